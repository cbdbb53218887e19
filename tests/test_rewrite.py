"""`fxfuse.rewrite`: the FX pass alone, on graphs from symbolic_trace, export and Dynamo."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from models import ConvGeluPool, ConvNormPoolGelu, dynamo_graph, fused_nodes, reasons
from torch import fx, nn

import fxfuse
from fxfuse import engine
from fxfuse.engine import NotFusedError
from fxfuse.options import OptionError


@pytest.fixture(autouse=True)
def libraries_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "fuse", partial(engine.fuse, unavailable=lambda device: None))


def image() -> torch.Tensor:
    return torch.zeros(2, 4, 8, 8)


def test_a_traced_graph_is_rewritten_and_itself_left_alone() -> None:
    model = ConvGeluPool()
    gm = fx.symbolic_trace(model)
    before, metas = gm.code, [dict(node.meta) for node in gm.graph.nodes]
    with torch.no_grad():
        fused, report = fxfuse.rewrite(gm, image(), select="always")
    assert [record.op for record in report.fused] == ["gelu_pool"] and len(fused_nodes(fused.graph)) == 1
    assert fused is not gm and gm.code == before
    assert [dict(node.meta) for node in gm.graph.nodes] == metas
    # The same parameters, not copies: training the model afterwards reaches the rewritten graph too.
    assert fused.get_parameter("conv.weight") is model.conv.weight
    fused.graph.lint()
    assert "fxfuse.gelu_pool" in fused.code


def test_a_graph_with_nothing_to_fuse_comes_back_itself() -> None:
    gm = fx.symbolic_trace(nn.Sequential(nn.Conv2d(4, 8, 3), nn.ReLU()))
    with torch.no_grad():
        fused, report = fxfuse.rewrite(gm, image(), select="always")
    assert fused is gm and not report.fused and not report.declined
    assert all("val" not in node.meta for node in gm.graph.nodes)


def test_an_export_graph_needs_no_example_inputs() -> None:
    gm = torch.export.export(ConvNormPoolGelu(), (torch.zeros(2, 4, 6, 6, 12),)).module()
    with torch.no_grad():
        fused, report = fxfuse.rewrite(gm, select="always")
    assert len(report.fused) == 1 and fused is not gm
    assert fused.graph._codegen is not gm.graph._codegen and type(fused.graph._codegen) is type(gm.graph._codegen)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("requires_grad", [False, True])
def test_an_export_graph_whose_inputs_are_a_tree_is_copied_without_a_warning(requires_grad: bool) -> None:
    class OfDict(ConvGeluPool):
        def forward(self, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            return {"pooled": super().forward(inputs["x"] + inputs["y"])}

    inputs = {"x": image(), "y": image()}
    gm = torch.export.export(OfDict().requires_grad_(False), (inputs,)).module()
    image_of = {name: value.clone().requires_grad_(requires_grad) for name, value in inputs.items()}
    fused, report = fxfuse.rewrite(gm, image_of, select="always")
    assert len(report.fused) == 1
    flattened = [[line for line in module.code.splitlines() if "tree_flatten_spec" in line] for module in (fused, gm)]
    assert flattened[0] == flattened[1] != []
    # `on_generate_code` of one does not write to the other.
    assert fused.graph._codegen is not gm.graph._codegen


def test_a_dynamo_graph() -> None:
    with torch.no_grad():
        gm = dynamo_graph(ConvGeluPool(), image())
        fused, report = fxfuse.rewrite(gm, select="always")
    assert len(report.fused) == 1 and fused is not gm and not fused_nodes(gm.graph)


def test_without_values_and_without_inputs_the_sentence_says_what_to_pass() -> None:
    gm = fx.symbolic_trace(ConvGeluPool())
    fused, report = fxfuse.rewrite(gm)
    assert fused is gm and "pass example inputs so that shapes are known" in reasons(report)[0]


def test_options() -> None:
    gm = fx.symbolic_trace(ConvGeluPool())
    with torch.no_grad():
        assert reasons(fxfuse.rewrite(gm, image(), select="never")[1]) == ['fxfuse.select is "never"']
        assert not fxfuse.rewrite(gm, image(), passes=["conv_norm_pool_gelu"])[1].declined
        with pytest.raises(NotFusedError, match="fxfuse.select is"):
            fxfuse.rewrite(gm, image(), select="never", strict=True)
        with pytest.raises(OptionError, match="unknown option 'fxfuse.stric'; the nearest is 'fxfuse.strict'"):
            fxfuse.rewrite(gm, image(), stric=True)


def test_with_grad_on_the_chain_is_left_alone_by_default() -> None:
    gm = fx.symbolic_trace(ConvGeluPool())
    fused, report = fxfuse.rewrite(gm, image())
    assert fused is gm and "torch.no_grad()" in reasons(report)[0]


def test_what_is_not_traced() -> None:
    with pytest.raises(TypeError, match="rewrite takes a torch.fx.GraphModule, not ConvGeluPool: torch.fx.symbolic_trace"):
        fxfuse.rewrite(ConvGeluPool(), image())
    with pytest.raises(TypeError, match=r"not ExportedProgram: .*\.module\(\)"):
        fxfuse.rewrite(torch.export.export(ConvGeluPool(), (image(),)), image())


@pytest.mark.parametrize("capture", [lambda model: fx.symbolic_trace(model), lambda model: torch.export.export(model, (image(),)).module()])
def test_an_input_that_needs_a_gradient_goes_through_a_frozen_model(capture: Callable[[nn.Module], fx.GraphModule]) -> None:
    gm = capture(ConvGeluPool().requires_grad_(False))
    metas = [dict(node.meta) for node in gm.graph.nodes]
    fused, _ = fxfuse.rewrite(gm, image().requires_grad_(), select="always")
    assert [node.target.name() for node in fused_nodes(fused.graph)] == ["fxfuse::gelu_pool_training"]
    assert [dict(node.meta) for node in gm.graph.nodes] == metas
    fused, _ = fxfuse.rewrite(gm, image(), select="always")
    assert [node.target.name() for node in fused_nodes(fused.graph)] == ["fxfuse::gelu_pool"]


@pytest.mark.parametrize("name", ["conv", "gelu", "pool"])
def test_a_module_with_a_forward_of_its_own_is_not_fused(name: str) -> None:
    model, x = ConvGeluPool(), torch.randn(2, 4, 8, 8)
    module = getattr(model, name)
    forward = module.forward
    module.forward = lambda y: 2 * forward(y)
    gm = fx.symbolic_trace(model)
    with torch.no_grad():
        fused, report = fxfuse.rewrite(gm, x, select="always")
        assert fused is gm and not report.fused
        assert torch.equal(fused(x), model(x))


def test_a_graph_module_with_a_forward_of_its_own_is_left_alone() -> None:
    gm, x = fx.symbolic_trace(ConvGeluPool()), torch.randn(2, 4, 8, 8)
    forward = gm.forward
    gm.forward = lambda y: 2 * forward(y)
    fused, report = fxfuse.rewrite(gm, x, select="always")
    assert fused is gm and report.stopped.startswith("the module's forward is not its graph's")
