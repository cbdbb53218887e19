"""What must hold for any chain before it may be replaced, whatever the chain is. Each check yields refusals as (node, sentence).

A replacement runs where the chain's last node stood and reads the chain's inputs there. It is the same computation only if nobody else
sees the values in between, nothing writes to the inputs in between, and the state that rules the ops (grad mode, autocast) is the same.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from itertools import pairwise

import torch
from torch import fx

from . import gradients, torch_private
from .match import Match, describe, listed
from .places import location_of
from .values import ModuleParameter, name_of, value_of
from .view import GraphView
from .writes import written

Refusal = tuple[fx.Node, str]

DEVICES = ("cuda", "cpu")


def refusal(view: GraphView, match: Match) -> Refusal | None:
    """The first reason why replacing the match would not be safe, or None."""
    checks = (unknown_values, outside_readers, inner_operands, foreign_writes, writes_between, writes_behind, state_changes, devices, annotations)
    return next((found for check in checks for found in check(view, match)), None)


def unknown_values(view: GraphView, match: Match) -> Iterator[Refusal]:
    """Conditions need the shape and dtype of every value; subclasses (DTensor, quantised, sparse) are not what the kernels read."""
    values = [(call.node, f"the result of {call.word}", call.value) for call in match.path]
    anchor = match.anchor.node
    for call in match.present:
        if call.value is not None and not isinstance(call.value, torch.Tensor):
            yield call.node, f"the result of {call.word} is a {type(call.value).__name__}, of which the first entry is not read"
    values += [(anchor, name_of(argument), value_of(argument)) for argument in match.inputs]
    for node, what, value in values:
        if value is None:
            yield node, f"the graph holds no example value for {what}; pass example inputs so that shapes are known"
        elif not isinstance(value, torch.Tensor):
            continue
        elif value.is_quantized or value.layout is not torch.strided:
            yield node, f"{what} is a {'quantized' if value.is_quantized else value.layout} tensor; the kernels read dense strided tensors"
        elif not torch_private.is_plain(value):
            yield node, f"{what} is a {type(value).__name__} or under a torch.func transform; the kernels read plain tensors"
    # The example value of such a tensor is what it is reshaped to, not what the chain sees.
    for node in (*match.in_order, *match.inputs):
        by = view.reshaped_by(node)
        if by is not None:
            yield anchor, f"{describe(view, by)} changes the shape of {name_of(node)} in place; use the form without underscore"


def outside_readers(view: GraphView, match: Match) -> Iterator[Refusal]:
    """A value inside the chain that something else reads would be gone."""
    inner = match.nodes
    for call in match.path:
        for node in call.nodes:
            if node is match.last.result:
                continue
            others = [reader for reader in dict.fromkeys([*node.users, *view.readers[node]]) if reader not in inner]
            if others:
                names = listed([f"{describe(view, reader)} ({reader.name})" for reader in others])
                yield node, f"the result of {call.word} is also used by {names}; only a chain whose inner values nobody else reads can be fused"


def inner_operands(view: GraphView, match: Match) -> Iterator[Refusal]:
    """The chain's own value may enter a step once, by the argument it flows in by (`y + y` reads it twice)."""
    inner = match.nodes
    for _, call in pairwise(match.path):
        for name, argument in call.args.items():
            if isinstance(argument, fx.Node) and argument in inner and name != call.by:
                yield call.node, f"{call.word} takes the chain's own value as its {name} too"


def foreign_writes(view: GraphView, match: Match) -> Iterator[Refusal]:
    """An in-place step may write to the chain's own value, not to its other operand (`w += y`), of which that value may be a view too."""
    inner = match.nodes
    outside = {view.storage_of(argument): name_of(argument) for argument in match.inputs}
    for call in match.path:
        for target in written(call.node):
            # A module's own buffers are its business; only what the chain reads matters, and writes_between sees to that.
            if isinstance(target, fx.Node) and target not in inner:
                yield call.node, f"the in-place {call.word} writes to {target.name}, which is not {match.subject}'s result"
            storage = view.storage_of(target)
            if storage is not None and storage in outside:
                yield call.node, f"the in-place {call.word} writes to {outside[storage]} through a view of it; use the form without underscore"
    storage = view.storage_of(match.last.result)
    if storage is not None and storage in outside:
        yield match.last.node, f"the chain's result is a view of {outside[storage]}; a fused result would be a tensor of its own"


def writes_between(view: GraphView, match: Match) -> Iterator[Refusal]:
    """The replacement reads its inputs at the end of the chain; a write to one of them (or a view of it) in between would be seen."""
    first, last = _span(view, match)
    for argument in match.inputs:
        writer = view.write_between(argument, first, last, match.nodes)
        if writer is not None:
            yield writer, (
                f"{describe(view, writer)} may write to {name_of(argument)} between {match.subject} and {match.last.word}"
                f"{_at(writer)}; move the write before or after the chain"
            )


def writes_behind(view: GraphView, match: Match) -> Iterator[Refusal]:
    """Where the result needs a gradient the backward reads all inputs again, those too that eager's backward has no use for (bias, addend)."""
    if not gradients.is_needed(match):
        return
    _, last = _span(view, match)
    for argument in match.inputs:
        yield from written_behind(view, argument, last)


def written_behind(view: GraphView, argument: fx.Node | ModuleParameter, last: int) -> Iterator[Refusal]:
    """What may write behind a position to a value that a backward reads again."""
    # A backward that is in the graph itself is over once it is called; any other one comes when the graph has run.
    backward = next((index for node, index in view.order.items() if node.target is torch.autograd.grad and index > last), len(view.nodes))
    writer = view.write_between(argument, last, backward)
    if writer is not None:
        yield writer, (
            f"the result needs a gradient, and {describe(view, writer)} may write to {name_of(argument)} behind the chain{_at(writer)}, "
            "whose backward reads it again; write to a copy, or before the chain"
        )


def state_changes(view: GraphView, match: Match) -> Iterator[Refusal]:
    """An autocast, grad-mode or stream boundary inside the chain: its ops run under different rules. Under a torch.func transform the ops
    would need batching and derivative rules that they do not have."""
    first, last = _span(view, match)
    index = bisect_right(view.state_changes, first)
    if index < len(view.state_changes) and view.state_changes[index] < last:
        node = view.nodes[view.state_changes[index]]
        yield node, f"{describe(view, node)} changes how ops run between {match.subject} and {match.last.word}{_at(node)}"
    if view.transform_depth[bisect_right(view.state_changes, first)]:
        yield match.anchor.node, "the chain is inside a torch.func transform (vmap, grad, jvp), for which the fused ops have no rules"


def devices(view: GraphView, match: Match) -> Iterator[Refusal]:
    """One device for all; a 0-dim CPU tensor may join a CUDA chain, as in eager."""
    device = match.anchor.value.device
    if device.type not in DEVICES:
        yield match.anchor.node, f"the chain is on {device.type}; kernels exist for {' and '.join(DEVICES)}"
    for argument in match.inputs:
        value = value_of(argument)
        if isinstance(value, torch.Tensor) and value.device != device and (value.dim() > 0 or value.device.type != "cpu"):
            yield match.anchor.node, f"{name_of(argument)} is on {value.device}, {match.subject} on {device}"


def annotations(view: GraphView, match: Match) -> Iterator[Refusal]:
    """One node cannot be marked in two ways (a region's memory budget, what is to be recomputed, a user's own mark)."""
    first, marks = match.anchor.node, torch_private.annotations(match.anchor.node)
    for node in match.in_order:
        other = torch_private.annotations(node)
        name = next((name for name in {**marks, **other} if marks.get(name) != other.get(name)), None)
        if name is not None:
            yield node, (
                f"{node.name} is annotated otherwise ({name}={other.get(name)!r}) than {first.name} ({marks.get(name)!r}); "
                "let the region hold the whole chain, or nothing of it"
            )


def _span(view: GraphView, match: Match) -> tuple[int, int]:
    return view.order[match.anchor.node], view.order[match.last.result]


def _at(node: fx.Node) -> str:
    location = location_of(node)
    return f" at {location}" if location else ""
