"""A chain from outside, in its simplest form: conv -> relu, with an op of the tests' own."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

import fxfuse

aten = torch.ops.aten
RELU = fxfuse.Word(
    "relu",
    fxfuse.Spelling(aten.relu.default, F.relu, torch.relu, methods=("relu",), modules={nn.ReLU: ("inplace",)}, also={"inplace": (False, True)}),
    fxfuse.Spelling(aten.relu_.default, torch.relu_, methods=("relu_",)),
)
SIN = fxfuse.Word("sin", fxfuse.Spelling(aten.sin.default, torch.sin, methods=("sin",)), fxfuse.Spelling(aten.sin_.default, methods=("sin_",)))


@torch.library.custom_op("fxfuse_tests::relu", mutates_args=())
def relu_op(x: torch.Tensor) -> torch.Tensor:
    """relu(x)"""
    return torch.relu(x)


@relu_op.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


@torch.library.custom_op("fxfuse_tests::trained", mutates_args=())
def trained_op(x: torch.Tensor) -> torch.Tensor:
    """relu(x), which takes part in training by its twin."""
    return torch.relu(x)


@torch.library.custom_op("fxfuse_tests::trained_training", mutates_args=())
def trained_twin(x: torch.Tensor) -> torch.Tensor:
    """What stands for it where a gradient is needed; no test runs it."""
    return torch.relu(x)


@trained_op.register_fake
@trained_twin.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def to_trained(emit: fxfuse.Emitter, conv: fxfuse.Call, relu: fxfuse.Call) -> fx.Node:
    """conv -> the op that takes part in training."""
    return emit(trained_op, conv.result)


class Net(nn.Module):
    """[N, 4, 8, 8] -> conv output [N, 8, 6, 6] -> relu."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(4, 8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.conv(x))


def yes(**calls: Any) -> Iterator[tuple[bool, str]]:
    """Conditions that hold."""
    yield True, ""


def to_op(emit: fxfuse.Emitter, conv: fxfuse.Call, relu: fxfuse.Call) -> fx.Node:
    """conv -> the op."""
    return emit(relu_op, conv.result)


def implementation(
    op: str = "fxfuse_tests::relu", takes: Any = yes, replace: Any = to_op, cost: Any = None, backward_cost: Any = None
) -> fxfuse.Implementation:
    """An implementation of conv -> relu that takes everything."""
    return fxfuse.Implementation(op, takes, replace, cost, backward_cost=backward_cost)


def conv_relu(name: str = "conv_relu", words: tuple[fxfuse.Word, ...] = (RELU,), word: str = "relu", **own: Any) -> fxfuse.Chain:
    """conv -> relu; `own`: op, takes, replace, cost, backward_cost of its implementation."""
    steps = (fxfuse.Step("conv", "conv"), fxfuse.Step("relu", word))
    return fxfuse.Chain(name, steps, yes, (implementation(**own),), words=words)


def chain(**fields: Any) -> fxfuse.Chain:
    """conv -> relu with other fields."""
    return dataclasses.replace(conv_relu(), **fields)


def of_steps(
    name: str,
    words_of_steps: Sequence[str | tuple[str, ...]],
    words: tuple[fxfuse.Word, ...] = (),
    replace: Callable[..., fx.Node] | None = None,
    names: Sequence[str] = (),
) -> fxfuse.Chain:
    """A chain of these words that takes everything; its steps have the words' names unless `names` has others."""
    accepted = [(word,) if isinstance(word, str) else word for word in words_of_steps]
    steps = tuple(fxfuse.Step(step, *own) for step, own in zip(names or [own[0] for own in accepted], accepted))

    def refuse(emit: fxfuse.Emitter, **calls: Any) -> fx.Node:
        raise AssertionError("nothing was to be replaced")

    return fxfuse.Chain(name, steps, yes, (implementation(replace=replace or refuse),), words=words)


CONV_RELU = conv_relu()
