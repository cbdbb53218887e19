"""Graphs that need gradients: where the training ops take the place of the others. No compiler is needed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from chains import conv_relu
from models import ConvGeluPool, ConvNormPoolGelu, dynamo_graph, exported_graph, fake_mode, fuse, fused_nodes, gelu_pool, reasons, traced_graph
from torch import fx, nn

import fxfuse

X, W = (2, 4, 8, 8), (8, 4, 3, 3)


def ops(graph: fx.Graph) -> list[str]:
    return [node.target.name() for node in fused_nodes(graph)]


@pytest.mark.parametrize("capture", [traced_graph, exported_graph])
def test_parameters_need_a_gradient_where_grad_is_on(capture: Callable[..., fx.GraphModule]) -> None:
    gm = capture(ConvGeluPool(), torch.zeros(X))
    assert ops(fuse(gm)[0]) == ["fxfuse::gelu_pool_training"]
    with torch.no_grad():
        assert ops(fuse(gm)[0]) == ["fxfuse::gelu_pool"]
    frozen = capture(ConvGeluPool().requires_grad_(False), torch.zeros(X))
    assert ops(fuse(frozen)[0]) == ["fxfuse::gelu_pool"]


@pytest.mark.parametrize("capture", [traced_graph, exported_graph])
def test_a_frozen_chain_behind_a_trained_layer(capture: Callable[..., fx.GraphModule]) -> None:
    """The layer's gradient comes through the chain, of which no parameter is trained."""
    model = nn.Sequential(nn.Conv2d(4, 4, 1), nn.ReLU(), ConvGeluPool().requires_grad_(False))
    assert ops(fuse(capture(model, torch.zeros(X)))[0]) == ["fxfuse::gelu_pool_training"]


def test_an_input_that_needs_a_gradient() -> None:
    with fake_mode():
        x, w = torch.zeros(X, requires_grad=True), torch.zeros(W)
        gm = dynamo_graph(lambda x, w: gelu_pool(torch.conv2d(x, w)), x, w)
        (node,) = fused_nodes(fuse(gm)[0])
        assert node.target.name() == "fxfuse::gelu_pool_training" and node.meta["example_value"].requires_grad
        gm = dynamo_graph(lambda x, w: gelu_pool(torch.conv2d(x.detach(), w)), x, w)
        assert ops(fuse(gm)[0]) == ["fxfuse::gelu_pool"]


def test_a_write_to_an_input_behind_the_chain() -> None:
    """Eager's backward does not read the convolution's bias; the op's does."""

    def run(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        out = gelu_pool(torch.conv2d(x, w, b))
        b.add_(1)
        return out

    gm = dynamo_graph(run, torch.zeros(X), torch.zeros(W, requires_grad=True), torch.zeros(8))
    graph, report = fuse(gm)
    assert graph is gm.graph and "add may write to l_b_ behind the chain at " in reasons(report)[0]
    assert ops(fuse(dynamo_graph(run, torch.zeros(X), torch.zeros(W), torch.zeros(8)))[0]) == ["fxfuse::gelu_pool"]


@pytest.mark.skipif(not hasattr(torch._dynamo.config, "trace_autograd_ops"), reason="this torch breaks the graph at a backward")
def test_a_step_behind_a_backward_in_the_graph() -> None:
    def run(x: torch.Tensor, w: torch.Tensor) -> None:
        (grad,) = torch.autograd.grad(gelu_pool(torch.conv2d(x, w)).sum(), w)
        with torch.no_grad():
            w.sub_(grad)

    with torch._dynamo.config.patch(trace_autograd_ops=True):
        gm = dynamo_graph(run, torch.zeros(X), torch.zeros(W, requires_grad=True))
    assert ops(fuse(gm)[0]) == ["fxfuse::gelu_pool_training"]


@pytest.mark.parametrize("select, said", [("auto", "was not measured in training"), ("never", '"never"')])
def test_eval_mode_alone_is_a_training_graph(select: str, said: str) -> None:
    with fake_mode():
        model = nn.Sequential(ConvGeluPool(), nn.Flatten()).eval()
        gm = dynamo_graph(model, torch.zeros(X))
    graph, report = fuse(gm, select)
    assert graph is gm.graph and said in reasons(report)[0] and report.declined[0].reached == "pool"


def test_auto_says_what_to_do_for_inference() -> None:
    with fake_mode():
        gm = dynamo_graph(ConvNormPoolGelu().eval(), torch.zeros(2, 4, 6, 6, 12))
    assert "(model.eval() alone does not turn gradients off)" in reasons(fuse(gm, "auto")[1])[0]


def test_a_chain_from_outside_without_a_gradient() -> None:
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU())
    with fxfuse.register(conv_relu()):
        gm = dynamo_graph(model, torch.zeros(X))
        graph, report = fuse(gm)
        assert graph is gm.graph and "the op has none" in reasons(report)[0]
