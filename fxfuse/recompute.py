"""Gradients of ops that contain a convolution: its output is computed again, and its gradient goes straight into those of input and weight."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from . import flops, precision
from .fused import CHANNELS_LAST, convolution
from .training import Arguments, Backward, Kernel

aten = torch.ops.aten


def through_convolution(
    tail: Callable[..., Mapping[str, torch.Tensor]],
    tail_arguments: Callable[[Arguments], Arguments],
    kernel: Kernel = lambda grad, arguments, names: None,
) -> Backward:
    """The gradients of an op that is a convolution and then a tail op.

    tail: the tail op's, with the convolution's output as its `input`, whose place it may take: tail(grad, arguments, names, may_overwrite).
    tail_arguments: its arguments that the whole op does not have. kernel: see `Backward`.
    """

    def gradients(grad: torch.Tensor, arguments: Arguments, names: Sequence[str]) -> dict[str, torch.Tensor]:
        input, weight = _for_library(arguments)
        geometry = _geometry(arguments)
        of_tail = [name for name in names if name not in ("input", "weight")]
        with precision.switched(arguments["precision"]):
            y = convolution(input, weight, *geometry)
            found = dict(tail(grad, {**arguments, **tail_arguments(arguments), "input": y}, of_tail, may_overwrite=True))
            of_y = found.pop("input").to(y.dtype)
            found.update(_of_convolution(of_y, input, weight, geometry, names))
        return found

    def inner(arguments: Arguments) -> int:
        stride, padding, dilation, transposed, output_padding = _geometry(arguments)
        geometry = tuple(stride), tuple(padding), tuple(dilation), transposed, tuple(output_padding)
        return _number_of_outputs(arguments["input"].shape, arguments["weight"].shape, geometry)

    def is_sample(name: str, arguments: Arguments) -> bool:
        return name == "input" and arguments["input"].dim() == arguments["weight"].dim()

    return Backward(gradients, inner, is_sample, kernel=kernel, flops=flops.of_convolution_again)


@functools.lru_cache(maxsize=1024)
def _number_of_outputs(input: torch.Size, weight: torch.Size, geometry: tuple[Any, ...]) -> int:
    return math.prod(convolution(*(torch.empty(shape, device="meta") for shape in (input, weight)), *geometry).shape)


def _for_library(arguments: Arguments) -> tuple[torch.Tensor, torch.Tensor]:
    """Input and weight in the layout that cuDNN's tensor core kernels want: others they copy there, and the output back. On an H200 the headline
    models' convolutions and their weight's gradients take .4 to .8 of the time so."""
    input, weight = arguments["input"], arguments["weight"]
    uses_tensor_cores = input.element_size() == 2 or arguments["precision"] == "tf32"
    if not (input.is_cuda and uses_tensor_cores and input.dim() == weight.dim() and weight.dim() in CHANNELS_LAST):
        return input, weight
    return tuple(tensor.contiguous(memory_format=CHANNELS_LAST[weight.dim()]) for tensor in (input, weight))


def dense(input: torch.Tensor, contiguous: bool = False) -> tuple[torch.Tensor, bool]:
    """`input` [N, C, *spatial] as it is if it is contiguous or, unless `contiguous`, channels_last; else a contiguous copy, and True."""
    if input.is_contiguous() or (not contiguous and _is_channels_last(input)):
        return input, False
    return input.contiguous(), True


def _is_channels_last(input: torch.Tensor) -> bool:
    memory_format = CHANNELS_LAST.get(input.dim())
    return input.is_contiguous(memory_format=memory_format) if memory_format else input.movedim(1, -1).is_contiguous()


def over_channels(bias: torch.Tensor, dims: int) -> torch.Tensor:
    """A value for each channel, in fp32, as it joins [..., C, *spatial] with that many spatial dimensions."""
    return bias.float().reshape(-1, *[1] * dims)


def sum_but_channels(of_y: torch.Tensor, dims: int) -> torch.Tensor:
    """The gradient of what joined [..., C, *spatial] by `over_channels`."""
    return of_y.sum([dim for dim in range(of_y.dim()) if dim != of_y.dim() - dims - 1])


def _geometry(arguments: Arguments) -> tuple[Any, ...]:
    """stride, padding, dilation, transposed, output_padding; what the op's schema lacks is what every convolution of it has."""
    dims = arguments["weight"].dim() - 2
    dilation, output_padding = arguments.get("dilation", [1] * dims), arguments.get("output_padding", [0] * dims)
    return arguments["stride"], arguments["padding"], dilation, arguments.get("transposed", False), output_padding


def _of_convolution(
    of_y: torch.Tensor, input: torch.Tensor, weight: torch.Tensor, geometry: tuple[Any, ...], names: Sequence[str]
) -> dict[str, torch.Tensor]:
    is_batched = input.dim() == weight.dim()
    of_y, batch = (of_y, input) if is_batched else (of_y.unsqueeze(0), input.unsqueeze(0))
    asked = ["input" in names, "weight" in names, False]
    of_input, of_weight, _ = aten.convolution_backward(of_y, batch, weight, None, *geometry, 1, asked)
    return {"weight": of_weight, "input": of_input if is_batched or of_input is None else of_input.squeeze(0)}
