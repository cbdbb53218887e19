"""What the backwards of chains that start at a convolution share, as costs."""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from . import torch_private
from .cost import BackwardCost, Convolution, Training, Work
from .fused import library_convolution
from .training import PIECE_BYTES
from .view import Call

# The share of the tails' bandwidth that torch's own ops reach, by device type: on an H200 as measured of conv_norm_pool_gelu's backward, on a CPU as
# Inductor's kernels (`RATES` of fxfuse.choose).
TORCHS_SHARE = {"cuda": 0.2, "cpu": 0.6}


def gradients_of(conv: Call, training: Training) -> tuple[Convolution, ...]:
    """The gradients of the convolution's input and weight that are asked for: each has the convolution's operations and bytes."""
    return (library_convolution(conv),) * training.needs("conv.input", "conv.weight")


def computed_again(conv: Call, tail: BackwardCost, own: Work | None = None) -> BackwardCost:
    """The backward of an op that contains the convolution: its tail's behind the convolution, in pieces of the batch (`fxfuse.training`)."""
    pieces = min(_batch(conv), math.ceil(wide_bytes(conv.value) / PIECE_BYTES))
    kernels = pieces * tail.op.kernels + (pieces - 1) * (1 + len(tail.convolutions))
    return replace(tail, op=replace(tail.op, kernels=kernels), again=library_convolution(conv), pieces=pieces, own=own)


def torchs_own(value: torch.Tensor, passes: int) -> Work:
    """A backward in torch's own ops: so many reads and writes of a tensor of the value's size in fp32; a value of 16 bits is widened first, and
    its gradient narrowed at the end."""
    wide, given = wide_bytes(value), value.element_size() / 4
    moved = wide * (passes if given == 1 else passes + 2 * (1 + given))
    return Work(int(moved / TORCHS_SHARE[value.device.type]), kernels=passes)


def wide_bytes(value: torch.Tensor) -> int:
    """Bytes of a tensor of the value's size in fp32."""
    return 4 * math.prod(torch_private.hint(size) for size in value.shape)


def _batch(conv: Call) -> int:
    is_batched = conv.value.dim() == conv.tensor("weight").dim()
    return max(1, torch_private.hint(conv.value.shape[0])) if is_batched else 1
