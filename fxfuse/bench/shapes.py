"""A chain of one size, and its model; `sweep.py` lists the sizes that are measured."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

CONVOLUTIONS = {
    False: {1: nn.Conv1d, 2: nn.Conv2d, 3: nn.Conv3d},
    True: {1: nn.ConvTranspose1d, 2: nn.ConvTranspose2d, 3: nn.ConvTranspose3d},
}
POOLS = {1: F.adaptive_avg_pool1d, 2: F.adaptive_avg_pool2d, 3: F.adaptive_avg_pool3d}
# Elements of a convolution's output on a CPU: 16 MB in fp32.
CPU_ELEMENTS = 2**22


@dataclass(frozen=True)
class Shape:
    """A chain of one size.

    chain: "conv_gelu_pool" (output_size counts) or "conv_norm_pool_gelu" (norm_ndim, pool and addend count: "scalar" for a 0-dim parameter,
    "channel" for one of C values, "number", "none"). spatial: of the convolution's input.
    """

    chain: str
    n: int
    c_in: int
    c_out: int
    kernel: int
    spatial: tuple[int, ...]
    stride: int = 1
    padding: int = 0
    transposed: bool = False
    output_padding: int = 0
    output_size: int = 1
    pool: int = 2
    norm_ndim: int = 1
    addend: str = "scalar"

    @property
    def name(self) -> str:
        """Everything that tells the shape from the others, e.g. "conv_gelu_pool n8 c3-32 k7 112x112"."""
        size = "x".join(map(str, self.spatial))
        doubling = (self.stride, self.padding, self.transposed, self.output_padding) == (2, 1, True, 1)
        marks = [
            (doubling, "doubling"),
            (self.transposed and not doubling, "transposed"),
            (self.stride != 1 and not doubling, f"s{self.stride}"),
            (self.padding and not doubling, f"p{self.padding}"),
            (self.output_padding and not doubling, f"op{self.output_padding}"),
            (self.output_size != 1, f"to{self.output_size}"),
            (self.pool != 2, f"pool{self.pool}"),
            (self.norm_ndim != 1, f"norm{self.norm_ndim}"),
            (self.addend != "scalar", f"addend={self.addend}"),
        ]
        return " ".join([self.chain, f"n{self.n}", f"c{self.c_in}-{self.c_out}", f"k{self.kernel}", size, *(mark for holds, mark in marks if holds)])

    @property
    def input(self) -> tuple[int, ...]:
        """The model's input shape."""
        return (self.n, self.c_in, *self.spatial)

    @property
    def between(self) -> tuple[int, ...]:
        """The convolution's output shape."""
        return (self.n, self.c_out, *map(self._size, self.spatial))

    def _size(self, size: int) -> int:
        if self.transposed:
            return (size - 1) * self.stride - 2 * self.padding + self.kernel + self.output_padding
        return (size + 2 * self.padding - self.kernel) // self.stride + 1

    def make(self) -> nn.Module:
        """The model, with fresh parameters."""
        geometry = {"stride": self.stride, "padding": self.padding}
        if self.transposed:
            geometry["output_padding"] = self.output_padding
        conv = CONVOLUTIONS[self.transposed][len(self.spatial)](self.c_in, self.c_out, self.kernel, **geometry)
        return Pooled(conv, self) if self.chain == "conv_gelu_pool" else Normed(conv, self)

    def for_cpu(self) -> Shape:
        """The shape with its batch, then its sizes halved until a CPU does it in a moment."""
        shape = self
        while math.prod(shape.between) > CPU_ELEMENTS:
            halved = tuple(size // 2 for size in shape.spatial)
            shape = dataclasses.replace(shape, n=shape.n // 2) if shape.n > 1 else dataclasses.replace(shape, spatial=halved)
        return shape


class Pooled(nn.Module):
    """conv -> gelu -> adaptive average pool."""

    def __init__(self, conv: nn.Module, shape: Shape) -> None:
        super().__init__()
        self.conv, self.output_size, self.pool = conv, shape.output_size, POOLS[len(shape.spatial)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.pool(F.gelu(self.conv(x)), self.output_size)


class Normed(nn.Module):
    """conv -> add -> layer_norm -> avg_pool3d -> gelu."""

    def __init__(self, conv: nn.Module, shape: Shape) -> None:
        super().__init__()
        self.conv, self.norm, self.pool = conv, nn.LayerNorm(shape.between[-shape.norm_ndim :]), shape.pool
        parameters = {"scalar": torch.tensor(0.5), "channel": torch.linspace(-1, 1, shape.c_out).view(-1, 1, 1, 1)}
        given = parameters.get(shape.addend)
        self.addend = 0.5 if given is None else nn.Parameter(given)
        self.adds = shape.addend != "none"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv(x)
        if self.adds:
            x = x + self.addend
        return F.gelu(F.avg_pool3d(self.norm(x), self.pool))
