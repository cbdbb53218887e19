"""Graphs that need gradients: where the training ops take the place of the others. No compiler is needed."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from chains import conv_relu
from convolutions import H200, TAKEN, graph_of, in_training
from models import ConvGeluPool, ConvNormPoolGelu, dynamo_graph, exported_graph, fake_mode, fuse, fused_nodes, gelu_pool, reasons, traced_graph
from torch import fx, nn

import fxfuse
from fxfuse import fused, weigh
from fxfuse.chain import chains
from fxfuse.choose import RATES
from fxfuse.gradients import training_of
from fxfuse.match import Match, find
from fxfuse.view import GraphView

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


@pytest.mark.parametrize("select, said", [("auto", "us in a training step, Inductor at least"), ("never", '"never"')])
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


@pytest.mark.parametrize("capture", [dynamo_graph, traced_graph, exported_graph])
def test_what_of_a_chain_needs_a_gradient(capture: Callable[..., fx.GraphModule]) -> None:
    def needed(model: nn.Module) -> set[str] | None:
        (match,) = [found for chain in chains() for found in find(GraphView(capture(model, volume).graph), chain) if isinstance(found, Match)]
        training = training_of(match)
        return None if training is None else set(training.needed)

    volume, model = torch.zeros(2, 4, 6, 6, 12), ConvNormPoolGelu()
    every = {"conv.weight", "conv.bias", "add.other", "norm.weight", "norm.bias"}
    assert needed(model) == every
    assert needed(nn.Sequential(nn.Conv3d(4, 4, 1), model)) == {"conv.input", *every}
    model.conv.requires_grad_(False)
    assert needed(model) == {"add.other", "norm.weight", "norm.bias"}
    assert needed(model.requires_grad_(False)) is None


@pytest.mark.parametrize("select, backward, expected", [
    ("auto", "recompute", "conv_gelu_pool"), ("auto", "save", "gelu_pool"), ("always", "auto", "conv_gelu_pool"), ("always", "save", "gelu_pool"),
    ("tail", "recompute", "gelu_pool"), ("auto", "auto", None), ("never", "save", None),
])  # fmt: skip
def test_options(select: str, backward: str, expected: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits for the backward, on a GPU that was measured, of a chain that is too small for the rule."""
    monkeypatch.setattr(fused, "gpu_of", lambda device: H200)
    monkeypatch.setattr(weigh, "rates_of", lambda device: RATES["NVIDIA H200"])
    graph, report = fuse(in_training(graph_of(*TAKEN["conv2d"])), select, backward=backward)
    assert [record.op for record in report.fused] == ([expected] if expected else [])
    assert ops(graph) == ([f"fxfuse::{expected}_training"] if expected else [])


@pytest.mark.parametrize("backward", ["recompute", "save"])
def test_outside_training_the_option_says_nothing(backward: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "gpu_of", lambda device: H200)
    with torch.no_grad():
        gm = graph_of(*TAKEN["conv2d"])
        for select in ("auto", "always", "tail"):
            assert fuse(gm, select, backward=backward)[1] == fuse(gm, select)[1]


def test_recompute_takes_the_tail_where_only_that_can_be() -> None:
    _, report = fuse(dynamo_graph(ConvGeluPool(), torch.zeros(X)), "auto", backward="recompute")
    assert [(record.op, record.choice) for record in report.fused] == [("gelu_pool", 'backward="recompute"')]


def test_a_chain_from_outside_without_a_gradient() -> None:
    model = nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU())
    with fxfuse.register(conv_relu()):
        gm = dynamo_graph(model, torch.zeros(X))
        graph, report = fuse(gm)
        assert graph is gm.graph and "the op has none" in reasons(report)[0]
        assert reasons(report)[0].count("torch.no_grad()") == 1
