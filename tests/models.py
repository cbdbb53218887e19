"""Small models with the two chains, ways to capture their graphs without running a kernel, and the rewrite of a captured graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.passes.fake_tensor_prop import FakeTensorProp

from fxfuse import engine
from fxfuse.options import Options
from fxfuse.report import Report

CONVS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED_CONVS = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
ADAPTIVE_POOLS = (nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d)


class ConvNormPoolGelu(nn.Module):
    """Chain A as nn modules: [N, 4, 6, 6, 12] -> Conv3d's output [N, 8, 4, 4, 10] -> [N, 8, 2, 2, 5]; width and channels differ."""

    def __init__(self, conv: Callable[..., nn.Module] = nn.Conv3d, add: Callable[..., torch.Tensor] = torch.add) -> None:
        super().__init__()
        self.conv = conv(4, 8, 3)
        self.sum_weight = nn.Parameter(torch.tensor(1.0))
        self.norm = nn.LayerNorm((10,))
        self.pool = nn.AvgPool3d(2)
        self.gelu = nn.GELU()
        self.add = add

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.gelu(self.pool(self.norm(self.add(self.conv(x), self.sum_weight))))


class ConvGeluPool(nn.Module):
    """Chain B as nn modules: [N, 4, 8, ...] -> conv output [N, 8, 6, ...] -> [N, 8, 1, ...]."""

    def __init__(self, dims: int = 2, transposed: bool = False, output_size: Any = 1) -> None:
        super().__init__()
        self.conv = (TRANSPOSED_CONVS if transposed else CONVS)[dims - 1](4, 8, 3)
        self.gelu = nn.GELU()
        self.pool = ADAPTIVE_POOLS[dims - 1](output_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.pool(self.gelu(self.conv(x)))


def norm_pool_gelu(y: torch.Tensor) -> torch.Tensor:
    """Chain A behind its add."""
    return F.gelu(F.avg_pool3d(F.layer_norm(y, y.shape[-1:]), 2))


def gelu_pool(y: torch.Tensor) -> torch.Tensor:
    """Chain B behind its 2-d convolution."""
    return F.adaptive_avg_pool2d(F.gelu(y), 1)


def fake_mode() -> FakeTensorMode:
    """Under this mode factories and nn modules make fake tensors, on devices that need not exist."""
    return FakeTensorMode(allow_non_fake_inputs=True)


def dynamo_graphs(function: Callable[..., Any], *args: Any, dynamic: bool | None = None, **kwargs: Any) -> list[fx.GraphModule]:
    """The graphs that Dynamo hands to a backend for this call, under the caller's grad mode."""
    graphs: list[fx.GraphModule] = []

    def backend(gm: fx.GraphModule, _: Any) -> Callable[..., Any]:
        graphs.append(gm)
        return gm.forward

    # Dynamo keeps by code object which sizes vary: a capture must not depend on the ones before it.
    torch._dynamo.reset()
    torch.compile(function, backend=backend, dynamic=dynamic)(*args, **kwargs)
    return graphs


def dynamo_graph(function: Callable[..., Any], *args: Any, dynamic: bool | None = None, **kwargs: Any) -> fx.GraphModule:
    """The only graph that Dynamo captures for this call."""
    (gm,) = dynamo_graphs(function, *args, dynamic=dynamic, **kwargs)
    return gm


def traced_graph(root: Callable[..., Any], *args: torch.Tensor) -> fx.GraphModule:
    """`torch.fx.symbolic_trace`, where nn modules are call_module nodes, with example values."""
    gm = fx.symbolic_trace(root)
    mode = fake_mode()
    FakeTensorProp(gm, mode).propagate(*(mode.from_tensor(arg) for arg in args))
    return gm


def exported_graph(model: nn.Module, *args: torch.Tensor, decompose: bool = False) -> fx.GraphModule:
    """`torch.export` as a graph module of aten overloads, with core-ATen decompositions or without."""
    program = torch.export.export(model, args)
    return (program.run_decompositions() if decompose else program).module()


def fuse(gm: fx.GraphModule, select: str = "always", **options: Any) -> tuple[fx.Graph, Report]:
    """The engine over a graph, as if every library were there."""
    return engine.fuse(gm.graph, Options(select=select, **options), unavailable=lambda device: None)


def fused_nodes(graph: fx.Graph) -> list[fx.Node]:
    """The nodes that call ops of fxfuse's."""
    return [node for node in graph.nodes if getattr(node.target, "namespace", None) == "fxfuse"]


def reasons(report: Report) -> list[str]:
    """Sentences of the declined candidates."""
    return [declined.reason for declined in report.declined]


def arguments(node: fx.Node) -> dict[str, Any]:
    """A fused op's arguments by the names of its schema."""
    return dict(zip((argument.name for argument in node.target._schema.arguments), node.args, strict=True))
