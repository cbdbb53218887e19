"""Chains whose result needs a gradient: which they are, and what takes their ops' place."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from .chain import Condition
from .match import Match
from .safety import external_inputs
from .values import ModuleParameter, attribute_of

# An op that takes part in training has a twin of the same arguments under its name with this behind it, which autograd knows.
SUFFIX = "_training"


def is_needed(match: Match) -> bool:
    """Whether the chain's result needs a gradient."""
    if any(call.value.requires_grad for call in match.present):
        return True
    # The values in an export graph are detached: there the parameters themselves must say it.
    return torch.is_grad_enabled() and any(_is_trained(argument) for argument in external_inputs(match))


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


def _is_trained(argument: fx.Node | ModuleParameter) -> bool:
    real = argument.value if isinstance(argument, ModuleParameter) else attribute_of(argument) if argument.op == "get_attr" else None
    return isinstance(real, torch.Tensor) and real.requires_grad
