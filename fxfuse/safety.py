"""What must hold for any chain before it may be replaced, whatever the chain is. Each check yields refusals as (node, sentence).

A replacement runs where the chain's last node stood and reads the chain's inputs there. It is the same computation only if nobody else
sees the values in between, nothing writes to the inputs in between, and the state that rules the ops (grad mode, autocast) is the same.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import fx

from . import torch_private
from .match import Match, describe
from .report import location_of
from .view import GraphView, ModuleParameter, mutated, value_of

Refusal = tuple[fx.Node, str]

DEVICES = ("cuda", "cpu")
# Calls that change how later ops compute: moving an op across one changes its result.
STATE_CHANGES = ("_enter_autocast", "_exit_autocast", "_set_grad_enabled", "_enter_inference_mode", "_exit_inference_mode", "set_default_dtype")


def refusal(view: GraphView, match: Match) -> Refusal | None:
    """The first reason why replacing the match would not be safe, or None."""
    checks = (unknown_values, outside_readers, foreign_writes, writes_between, state_changes, devices, gradients)
    return next((found for check in checks for found in check(view, match)), None)


def external_inputs(match: Match) -> list[fx.Node | ModuleParameter]:
    """The tensors that flow into the chain from outside, each once, in chain order."""
    inner = match.nodes
    found: dict[object, fx.Node | ModuleParameter] = {}
    for call in match.present:
        for argument in call.args.values():
            tensor = isinstance(argument, ModuleParameter) or (
                isinstance(argument, fx.Node) and argument not in inner and isinstance(value_of(argument), torch.Tensor)
            )
            if tensor:
                found.setdefault(argument, argument)
    return list(found.values())


def unknown_values(view: GraphView, match: Match) -> Iterator[Refusal]:
    """Conditions need the shape and dtype of every value; subclasses (DTensor, quantised, sparse) are not what the kernels read."""
    values = [(call.node, call.word, call.value) for call in match.present]
    anchor = match.anchor.node
    values += [(anchor, f"input {name_of(argument)}", value_of(argument)) for argument in external_inputs(match)]
    for node, what, value in values:
        if not isinstance(value, torch.Tensor):
            yield node, f"the graph holds no example value for {what}; pass example inputs so that shapes are known"
        elif value.layout is not torch.strided or value.is_quantized:
            yield node, f"{what} is a {value.layout if not value.is_quantized else 'quantized'} tensor; the kernels read dense strided tensors"
        elif not torch_private.is_plain(value):
            yield node, f"{what} is a {type(value).__name__}; the kernels read plain tensors"


def outside_readers(view: GraphView, match: Match) -> Iterator[Refusal]:
    """A value inside the chain that something else reads would be gone."""
    inner = match.nodes
    for call in match.present:
        for node in call.nodes:
            if node is match.last.result:
                continue
            others = [reader for reader in dict.fromkeys([*node.users, *view.readers[node]]) if reader not in inner]
            if others:
                names = ", ".join(f"{describe(view, reader)} ({reader.name})" for reader in others[:3])
                yield node, f"the result of {call.word} is also used by {names}; only a chain whose inner values nobody else reads can be fused"


def foreign_writes(view: GraphView, match: Match) -> Iterator[Refusal]:
    """An in-place step may write to the chain's own value, not to its other operand (`w += y`)."""
    inner = match.nodes
    for call in match.present:
        for target in mutated(call.node):
            if target not in inner:
                yield call.node, f"the in-place {call.word} writes to {target.name}, which is not the convolution's result"


def writes_between(view: GraphView, match: Match) -> Iterator[Refusal]:
    """The replacement reads its inputs at the end of the chain; a write to one of them (or a view of it) in between would be seen."""
    first, last = view.order[match.anchor.node], view.order[match.last.result]
    inputs = [argument for argument in external_inputs(match) if isinstance(argument, fx.Node)]
    for writer, target in view.writes:
        if not first < view.order[writer] < last or writer in match.nodes:
            continue
        for argument in inputs:
            if _may_alias(target, argument):
                yield writer, (
                    f"{describe(view, writer)} writes to {argument.name} between the convolution and {match.last.word}"
                    f"{_at(writer)}; move the write before or after the chain"
                )


def state_changes(view: GraphView, match: Match) -> Iterator[Refusal]:
    """An autocast or grad-mode boundary inside the chain: its ops run under different rules."""
    first, last = view.order[match.anchor.node], view.order[match.last.result]
    for node in view.nodes[first + 1 : last]:
        name = getattr(node.target, "__name__", "")
        if name in STATE_CHANGES:
            yield node, f"{name} changes how ops compute between the convolution and {match.last.word}{_at(node)}"


def devices(view: GraphView, match: Match) -> Iterator[Refusal]:
    """One device for all; a 0-dim CPU tensor may join a CUDA chain, as in eager."""
    device = match.anchor.value.device
    if device.type not in DEVICES:
        yield match.anchor.node, f"the chain is on {device.type}; kernels exist for {' and '.join(DEVICES)}"
    for argument in external_inputs(match):
        value = value_of(argument)
        if value.device != device and (value.dim() > 0 or value.device.type != "cpu"):
            yield match.anchor.node, f"{name_of(argument)} is on {value.device}, the convolution on {device}"


def gradients(view: GraphView, match: Match) -> Iterator[Refusal]:
    """The ops have no backward; in a training graph they would cut the gradient with no more than a warning."""
    if any(call.value.requires_grad for call in match.present):
        yield (
            match.anchor.node,
            "the result needs a gradient and the fused ops have none: call the model under torch.no_grad() or torch.inference_mode() "
            "(model.eval() alone does not turn gradients off)",
        )


def name_of(argument: fx.Node | ModuleParameter) -> str:
    """How a sentence names an input of the chain."""
    return argument.name if isinstance(argument, fx.Node) else argument.path


def _may_alias(left: fx.Node, right: fx.Node) -> bool:
    if left is right:
        return True
    values = value_of(left), value_of(right)
    if not all(isinstance(value, torch.Tensor) for value in values):
        return True
    return torch_private.storage_of(values[0]) == torch_private.storage_of(values[1])


def _at(node: fx.Node) -> str:
    location = location_of(node)
    return f" at {location}" if location else ""
