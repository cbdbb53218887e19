"""What is measured: models with their inputs, in a dtype, a precision of fp32 convolutions and a layout."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from ..fused import CHANNELS_LAST
from ..headline import HEADLINES
from .shapes import Shape
from .sweep import shapes

LAYOUTS = ("contiguous", "channels_last")
# Elements of a convolution's output from which the training sweep measures a shape: 13 MB in fp32.
TRAINED_ELEMENTS = 3_250_000
Built = tuple[nn.Module, tuple[Any, ...]]


@dataclass(frozen=True)
class Kind:
    """How a workload's numbers are held. precision: "tf32" or "ieee" for fp32 on CUDA, else empty. layout: of the inputs and the model."""

    dtype: str
    precision: str
    layout: str

    def __str__(self) -> str:
        return " ".join(filter(None, (self.dtype, self.precision, self.layout)))


@dataclass(frozen=True)
class Workload:
    """A model with example inputs. name: of what is measured, in whatever kind. chain: the chain that it is, empty for a user's model.

    build: makes the model and its inputs on a device, the same ones at each call.
    """

    name: str
    chain: str
    kind: Kind
    build: Callable[[torch.device], Built]

    def __str__(self) -> str:
        return f"{self.name} {self.kind}"


def kinds(device: torch.device) -> list[Kind]:
    """The kinds that a device is measured in; a CPU has no TF32."""
    numbers = [("float32", "tf32"), ("float32", "ieee"), ("bfloat16", ""), ("float16", "")]
    if device.type != "cuda":
        numbers = [("float32", ""), ("bfloat16", "")]
    return [Kind(*number, layout) for number, layout in itertools.product(numbers, LAYOUTS)]


def headline(device: torch.device) -> list[Workload]:
    """Both headline models in every kind."""

    def workload(model: Any, kind: Kind) -> Workload:
        return Workload(model.chain, model.chain, kind, lambda device: built(model.make, model.shape(device), kind, device, torch.rand))

    return [workload(model, kind) for model, kind in itertools.product(HEADLINES, kinds(device))]


def sweep(device: torch.device) -> list[Workload]:
    """Every shape in one kind, every fourth in a second one; the kinds are dealt out in turn."""
    found, dealt = [], kinds(device)
    for index, shape in enumerate(_sizes(device)):
        second = [3 * index + 1 + index // 4 % (len(dealt) - 1)] if index % 4 == 0 else []
        found += [_swept(shape, dealt[number % len(dealt)]) for number in (_first(index), *second)]
    # A shape without channels_last may have been dealt the same kind twice.
    return list({str(workload): workload for workload in found}.values())


def training_sweep(device: torch.device) -> list[Workload]:
    """Of `sweep`, in their first kind, the shapes whose convolution output is large enough to be worth keeping or computing again."""
    dealt = kinds(device)
    every = [_swept(shape, dealt[_first(index) % len(dealt)]) for index, shape in enumerate(_sizes(device))]
    large = [math.prod(shape.between) >= TRAINED_ELEMENTS for shape in _sizes(device).values()]
    return [workload for workload, is_large in zip(every, large) if is_large]


def _sizes(device: torch.device) -> dict[Shape, Shape]:
    """The sweep's shapes at the device's size, each with the one that it comes from; some are the same once they are small enough for a CPU."""
    found: dict[Shape, Shape] = {}
    for shape in shapes():
        found.setdefault(shape if device.type == "cuda" else shape.for_cpu(), shape)
    return found


def _first(index: int) -> int:
    """The number of a shape's kind: 3 has no factor in common with the number of kinds, so that neighbours, which are alike, differ in all."""
    return 3 * index


def _swept(shape: Shape, kind: Kind) -> Workload:
    if len(shape.input) not in CHANNELS_LAST:
        kind = Kind(kind.dtype, kind.precision, "contiguous")
    return Workload(shape.name, shape.chain, kind, lambda device: built(shape.make, shape.input, kind, device, torch.randn))


def built(make: Callable[[], nn.Module], shape: Sequence[int], kind: Kind, device: torch.device, values: Callable[..., torch.Tensor]) -> Built:
    """The model and its one input; `values`: torch.rand or torch.randn."""
    torch.manual_seed(0)
    dtype = getattr(torch, kind.dtype)
    model, inputs = make().to(device, dtype), (values(shape, device=device, dtype=dtype),)
    return to_channels_last(model, inputs) if kind.layout == "channels_last" else (model, inputs)


def to_channels_last(model: nn.Module, inputs: tuple[Any, ...]) -> Built:
    """Model and inputs in channels_last or channels_last_3d, by each tensor's rank. The model is changed in place."""
    for parameter in model.parameters():
        parameter.data = _channels_last(parameter.data)
    return model, tuple(map(_channels_last, inputs))


def _channels_last(value: Any) -> Any:
    if not isinstance(value, torch.Tensor) or value.dim() not in CHANNELS_LAST:
        return value
    return value.contiguous(memory_format=CHANNELS_LAST[value.dim()])


@contextmanager
def switched(precision: str) -> Iterator[None]:
    """cuDNN's fp32 convolutions in "tf32" or "ieee" within it; "" leaves the switches alone.

    All switches of cuDNN go along: Inductor's max-autotune reads the old one, which raises where they disagree.
    """
    if not precision:
        yield
        return
    before = _switches()
    _switch(precision == "tf32", precision, precision)
    try:
        yield
    finally:
        _switch(*before)


def _switches() -> tuple[bool, str, str]:
    cudnn = torch.backends.cudnn
    conv, rnn = cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision
    try:
        return cudnn.allow_tf32, conv, rnn
    except RuntimeError:  # old and new switches disagree, so that the old one cannot be read; True is torch's default
        return True, conv, rnn


def _switch(allowed: bool, conv: str, rnn: str) -> None:
    cudnn = torch.backends.cudnn
    cudnn.allow_tf32 = allowed
    cudnn.conv.fp32_precision, cudnn.rnn.fp32_precision = conv, rnn
