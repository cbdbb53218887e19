"""Chains whose result needs a gradient: which they are, what of them needs one, and what takes their ops' place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx, nn

from .chain import Condition
from .cost import Training
from .match import Match
from .values import ModuleParameter, attribute_of, value_of

# An op that takes part in training has a twin of the same arguments under its name with this behind it, which autograd knows.
SUFFIX = "_training"


def is_needed(match: Match) -> bool:
    """Whether the chain's result needs a gradient."""
    if any(call.value.requires_grad for call in match.present):
        return True
    if _values_tell(match) or not torch.is_grad_enabled():
        return False
    return is_trained(*match.inputs)


def is_trained(*values: fx.Node | ModuleParameter) -> bool:
    """Whether any of the values depends on a tensor that needs a gradient, in a graph whose own values do not say so."""
    return any(_is_trained(node) for node in ancestors(values))


def training_of(match: Match) -> Training | None:
    """What a training step asks of the chain; None where its result needs no gradient."""
    if not is_needed(match):
        return None
    arguments = ((f"{step}.{name}", given) for step, call in match.calls.items() if call is not None for name, given in call.args.items())
    return Training(frozenset(name for name, given in arguments if _needs_one(match, given)))


def twin_of(qualified: str) -> Any:
    """The op, "namespace::name", that takes an op's place where its result needs a gradient; None where there is none."""
    namespace, _, name = qualified.partition("::")
    packet = getattr(getattr(torch.ops, namespace), f"{name}{SUFFIX}", None)
    return None if packet is None else packet.default


def conditions(match: Match, qualified: str) -> Iterator[Condition]:
    """What must hold for an op to take the place of a chain whose result needs a gradient."""
    if not is_needed(match):
        return
    yield twin_of(qualified) is not None, (
        "the result needs a gradient and the op has none: call the model under torch.no_grad() or torch.inference_mode() (model.eval() alone "
        "does not turn gradients off)"
    )


def _values_tell(match: Match) -> bool:
    """Dynamo's values say whether they need a gradient; those of other captures are detached."""
    return "example_value" in match.last.result.meta


def _needs_one(match: Match, argument: Any) -> bool:
    """Whether an argument is a tensor from outside the chain that needs a gradient."""
    if not isinstance(argument, (fx.Node, ModuleParameter)) or argument in match.nodes:
        return False
    value = value_of(argument)
    if _values_tell(match):
        return isinstance(value, torch.Tensor) and value.requires_grad
    return isinstance(value, torch.Tensor) and is_trained(argument)


def ancestors(values: Sequence[fx.Node | ModuleParameter]) -> Iterator[fx.Node | ModuleParameter]:
    """The values and all that they depend on."""
    pending = list(values)
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
