"""Selective activation checkpoints: what the policy of one saves, asked as it will be when the body is traced."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from . import torch_private
from .command import in_a_word
from .values import value_of


def saved(policy: Any, body: fx.GraphModule) -> Mapping[str, str] | str:
    """The ops of a body whose results a policy saves, by the name of the node that calls them; where it cannot be asked, why not.

    policy: a `context_fn` as `torch.utils.checkpoint.checkpoint` takes it. It is asked about every op, in order, since it may count them.
    """
    asked = _Asked(body)
    inputs = [value_of(node) for node in body.graph.find_nodes(op="placeholder")]
    try:
        # Outside: what AOTAutograd keeps of the regions of this compilation must not come from here.
        with torch_private.outside_compilation(), torch_private.fake_mode_of(inputs):
            fresh = [torch.empty_like(value) if isinstance(value, torch.Tensor) else value for value in inputs]
            with torch_private.asking(policy, asked.note):
                asked.run(*fresh)
    except torch_private.Restart:
        raise
    except Exception as error:
        return in_a_word(error)
    return asked.saved


class _Asked(fx.Interpreter):
    """Runs a body and notes for which node the policy is asked."""

    def __init__(self, body: fx.GraphModule) -> None:
        super().__init__(body)
        self.saved: dict[str, str] = {}
        self._running = ""

    def run_node(self, n: fx.Node) -> Any:
        self._running = n.name
        return super().run_node(n)

    def note(self, op: Any, is_saved: bool) -> None:
        if is_saved:
            self.saved.setdefault(self._running, str(op))
