"""Nodes that change how later ops run."""

from __future__ import annotations

import torch
from torch import fx

STATE_CHANGES = frozenset(
    "_enter_autocast _exit_autocast _set_grad_enabled _enter_inference_mode _exit_inference_mode set_default_dtype set_stream "
    "_exchange_device _maybe_exchange_device set_device _set_deterministic_algorithms".split()
)


def changes_state(node: fx.Node) -> bool:
    """Whether a node changes how later ops run: autocast, grad mode, default dtype, streams, devices, torch.func transforms."""
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target.namespace == "streams"
    name = getattr(node.target, "__name__", "")
    return name in STATE_CHANGES or bool(transform_step(node))


def transform_step(node: fx.Node) -> int:
    """1 where a torch.func transform begins, -1 where it ends, else 0."""
    name = getattr(node.target, "__name__", "")
    return name.endswith("_increment_nesting") - name.endswith("_decrement_nesting")
