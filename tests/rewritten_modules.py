"""A model with the chain conv_gelu_pool to rewrite, and which of its graphs a rewritten module runs."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn
from torch.utils._python_dispatch import TorchDispatchMode

import fxfuse
from fxfuse.rewritten import Rewritten

X = torch.randn(2, 4, 9, 9, generator=torch.Generator().manual_seed(0))
X3 = torch.randn(2, 4, 6, 6, 12, generator=torch.Generator().manual_seed(0))
UNFUSED = "fxfuse: a rewritten module runs its graph unfused"


class Scaled(nn.Module):
    """Chain B times a parameter of the module's own."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Conv2d(4, 6, 3), nn.GELU(), nn.AdaptiveAvgPool2d(1))
        self.scale = nn.Parameter(torch.ones(6, 1, 1))

    def forward(self, x):
        return self.inner(x) * self.scale


class Ops(TorchDispatchMode):
    """Collects the names of the ops that run."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))


def runs_fused(module: nn.Module, *args: Any) -> bool:
    with Ops() as ops:
        module(*args)
    return any(name.startswith("fxfuse::") for name in ops.names)


def rewritten(model: nn.Module, x: torch.Tensor = X) -> tuple[fx.GraphModule, fx.GraphModule]:
    """The traced module and what `rewrite` makes of it."""
    gm = fx.symbolic_trace(model)
    fused, report = fxfuse.rewrite(gm, x, select="always")
    assert report.fused and isinstance(fused, Rewritten)
    return gm, fused
