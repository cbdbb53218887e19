"""Chains whose result needs a gradient: which they are, and what takes their ops' place."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx, nn

from .chain import Condition
from .match import Match
from .values import ModuleParameter, attribute_of, value_of

# An op that takes part in training has a twin of the same arguments under its name with this behind it, which autograd knows.
SUFFIX = "_training"


def is_needed(match: Match) -> bool:
    """Whether the chain's result needs a gradient."""
    if any(call.value.requires_grad for call in match.present):
        return True
    # Dynamo's values say whether they need a gradient; those of other captures are detached.
    if "example_value" in match.last.result.meta or not torch.is_grad_enabled():
        return False
    return any(_is_trained(node) for node in _ancestors(match))


def twin_of(qualified: str) -> Any:
    """The op, "namespace::name", that takes an op's place where its result needs a gradient; None where there is none."""
    namespace, _, name = qualified.partition("::")
    packet = getattr(getattr(torch.ops, namespace), f"{name}{SUFFIX}", None)
    return None if packet is None else packet.default


def conditions(match: Match, qualified: str, select: str) -> Iterator[Condition]:
    """What must hold for an op to take the place of a chain whose result needs a gradient."""
    if not is_needed(match):
        return
    yield twin_of(qualified) is not None, (
        "the result needs a gradient and the op has none: call the model under torch.no_grad() or torch.inference_mode() (model.eval() alone "
        "does not turn gradients off)"
    )
    yield select != "auto", (
        'the result needs a gradient, and select="auto" takes nothing that was not measured in training: for inference call the model under '
        "torch.no_grad() or torch.inference_mode() (model.eval() alone does not turn gradients off)"
    )


def _ancestors(match: Match) -> Iterator[fx.Node | ModuleParameter]:
    """What the chain's result is computed from: the chain's inputs and all that they depend on."""
    pending: list[fx.Node | ModuleParameter] = match.inputs
    seen = set(pending)
    while pending:
        found = pending.pop()
        yield found
        new = [source for source in found.all_input_nodes if source not in seen] if isinstance(found, fx.Node) else []
        seen.update(new)
        pending += new


def _is_trained(argument: fx.Node | ModuleParameter) -> bool:
    """Whether a parameter or buffer, the parameters of a module that is called, or else a value needs a gradient."""
    real = attribute_of(argument) if isinstance(argument, fx.Node) and argument.op in ("get_attr", "call_module") else value_of(argument)
    tensors = real.parameters() if isinstance(real, nn.Module) else [real]
    return any(isinstance(tensor, torch.Tensor) and tensor.requires_grad for tensor in tensors)
