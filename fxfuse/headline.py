"""The two models that the project is measured on: KernelBench level 2, problems 3 and 67."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


class ConvNormPoolGelu(nn.Module):
    """Chain A: ConvTranspose3d -> + a scalar parameter -> LayerNorm over the width -> AvgPool3d(2) -> GELU."""

    def __init__(self, in_channels: int = 32, out_channels: int = 64, width: int = 64) -> None:
        super().__init__()
        self.conv_transpose = nn.ConvTranspose3d(in_channels, out_channels, 3, stride=2, padding=1, output_padding=1)
        self.sum_weight = nn.Parameter(torch.tensor(1.0))
        self.norm = nn.LayerNorm((width,))
        self.avg_pool = nn.AvgPool3d(2)
        self.gelu = nn.GELU()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [N, in_channels, D, H, width / 2] -> [N, out_channels, D, H, width / 2]."""
        x = self.conv_transpose(x)
        x = x + self.sum_weight
        x = self.norm(x)
        x = self.avg_pool(x)
        return self.gelu(x)


class ConvGeluPool(nn.Module):
    """Chain B: Conv2d -> GELU -> global average pool -> [N, C]."""

    def __init__(self, in_channels: int = 8, out_channels: int = 64) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x: [N, in_channels, H, W] -> [N, out_channels]."""
        x = F.gelu(self.conv(x))
        return F.adaptive_avg_pool2d(x, 1).squeeze(-1).squeeze(-1)


@dataclass(frozen=True)
class Headline:
    """A headline model: its chain's name, how to make it, and input shapes: on a GPU and, smaller, on a CPU."""

    chain: str
    make: Callable[[], nn.Module]
    gpu_shape: tuple[int, ...]
    cpu_shape: tuple[int, ...]

    def shape(self, device: torch.device) -> tuple[int, ...]:
        """The input shape that suits the device: the batch is halved until the fp64 reference fits a GPU's free memory."""
        if device.type != "cuda":
            return self.cpu_shape
        batch, *rest = self.gpu_shape
        free, _ = torch.cuda.mem_get_info(device)
        # The fp64 check holds a few copies of the convolution's output, about 2 GB each at the full batch.
        while batch > 1 and batch / self.gpu_shape[0] * 24e9 > free:
            batch //= 2
        return (batch, *rest)


HEADLINES = (
    Headline("conv_norm_pool_gelu", ConvNormPoolGelu, (32, 32, 16, 32, 32), (2, 32, 8, 16, 32)),
    Headline("conv_gelu_pool", ConvGeluPool, (128, 8, 256, 256), (8, 8, 128, 128)),
)
