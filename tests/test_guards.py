"""Calls of a rewritten module under another state than it was rewritten for: they run the graph of the module given, and the first one warns."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import ConvGeluPool, ConvNormPoolGelu, dynamo_graph, fused_nodes
from rewritten_modules import UNFUSED, X3, Scaled, X, rewritten, runs_fused
from torch import fx, nn

import fxfuse

pytestmark = [pytest.mark.compiler, pytest.mark.filterwarnings("error::UserWarning:fxfuse")]


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def bfloat16(call: Callable[..., Any]) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        return call(X)


def with_gradients(call: Callable[..., Any]) -> Any:
    with torch.enable_grad():
        return call(X)


OTHER_CALLS = {
    "autocast of cpu is torch.bfloat16, not off": bfloat16,
    r"the input x is torch.float32\[4, 9, 9\] on cpu, not torch.float32\[\*, 4, \*, \*\] on cpu": lambda call: call(X[0]),
    "the result needs a gradient, and the fused ops have none": with_gradients,
}
OTHER_STATES = {
    "inner.0 is in training mode, not in evaluation mode": lambda gm: gm.train(),
    "inner.1 is another module, or has hooks or a forward of its own": lambda gm: gm.inner.get_submodule("1").register_forward_pre_hook(
        lambda module, args: 2 * args[0]
    ),
    "inner.2 is another module": lambda gm: setattr(gm.inner, "2", nn.AdaptiveMaxPool2d(1)),
    "inner.1 is another module, or has hooks or a forward": lambda gm: setattr(gm.inner.get_submodule("1"), "forward", torch.relu),
    "inner.0.bias is a NoneType": lambda gm: setattr(gm.inner.get_submodule("0"), "bias", None),
}


def check_unfused(gm: fx.GraphModule, fused: fx.GraphModule, call: Callable[..., Any], told: str) -> None:
    with pytest.warns(UserWarning, match=f"{UNFUSED}: {told}") as warned:
        result = call(fused)
        call(fused)
    assert len(warned) == 1
    expected = call(gm)
    assert torch.equal(result, expected) and (result.dtype, result.requires_grad) == (expected.dtype, expected.requires_grad)


@pytest.mark.parametrize(("told", "call"), OTHER_CALLS.items(), ids=OTHER_CALLS)
def test_a_call_under_another_state_runs_unfused_and_warns_once(told: str, call: Callable[..., Any]) -> None:
    gm, fused = rewritten(Scaled().eval())
    check_unfused(gm, fused, call, told)
    assert runs_fused(fused, X)


@pytest.mark.parametrize(("told", "change"), OTHER_STATES.items(), ids=OTHER_STATES)
def test_a_module_in_another_state_runs_unfused_and_warns_once(told: str, change: Callable[[nn.Module], Any]) -> None:
    gm, fused = rewritten(Scaled().eval())
    change(gm)
    check_unfused(gm, fused, lambda module: module(X), told)


def test_another_dtype_of_the_module_runs_unfused() -> None:
    gm, fused = rewritten(Scaled().eval())
    gm.double()
    check_unfused(gm, fused, lambda module: module(X.double()), "the input x is torch.float64")


def test_a_module_that_was_rewritten_under_that_state_runs_fused() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        _, fused = rewritten(Scaled())
        assert runs_fused(fused, X)
    with pytest.warns(UserWarning, match="autocast of cpu is off, not torch.bfloat16"):
        fused(X)


def test_the_chain_of_the_norm_under_autocast_keeps_eagers_dtype() -> None:
    class PoolsThenGelu(ConvNormPoolGelu):
        def forward(self, x):
            return self.gelu(self.pool(self.norm(self.conv(x))))

    gm, fused = rewritten(PoolsThenGelu(), X3)
    with pytest.warns(UserWarning, match="autocast of cpu"), torch.autocast("cpu", torch.bfloat16):
        assert fused(X3).dtype == gm(X3).dtype and torch.equal(fused(X3), gm(X3))


def test_gradients_are_eagers_whatever_the_module_was_rewritten_for() -> None:
    gm, fused = rewritten(Scaled())
    with torch.enable_grad():
        trained, _ = fxfuse.rewrite(gm, X, select="always")
        assert runs_fused(trained, X)
        expected = torch.autograd.grad(gm(X).sum(), gm.inner.get_submodule("0").weight)[0]
        torch.testing.assert_close(torch.autograd.grad(trained(X).sum(), gm.inner.get_submodule("0").weight)[0], expected)
        with pytest.warns(UserWarning, match="needs a gradient"):
            assert torch.equal(torch.autograd.grad(fused(X).sum(), gm.inner.get_submodule("0").weight)[0], expected)
        gm.requires_grad_(False)
        assert runs_fused(fused, X) and not runs_fused(fused, X.clone().requires_grad_())


@pytest.mark.parametrize("is_detached", [False, True])
def test_what_the_graph_detaches_needs_no_gradient(is_detached: bool) -> None:
    """The chain behind a `detach` has ops without gradients, and its module runs them with gradients on, as it was rewritten."""

    def run(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.adaptive_avg_pool2d(F.gelu(torch.conv2d(x.detach() if is_detached else x, w)), 1) * x.sum()

    with torch.enable_grad():
        x, w = X.clone().requires_grad_(), torch.randn(6, 4, 3, 3)
        fused, _ = fxfuse.rewrite(dynamo_graph(run, x, w), select="always")
        (op,) = fused_nodes(fused.graph)
        assert op.target.name().endswith("_training") != is_detached
        inputs = {"L_x_": x, "L_w_": w}
        assert runs_fused(fused, *(inputs[node.target] for node in fused.graph.find_nodes(op="placeholder")))


class Norm(ConvNormPoolGelu):
    def __init__(self, norm: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        del self.norm
        self.norm = norm


SIZES = {
    "batch": (ConvNormPoolGelu, (5, 4, 6, 6, 12), True),
    "other dimensions than the norm's": (ConvNormPoolGelu, (2, 4, 9, 8, 12), True),
    "the row of a norm": (ConvNormPoolGelu, (2, 4, 6, 6, 14), False),
    "the row of a norm without weight": (lambda: Norm(nn.LayerNorm((10,), elementwise_affine=False)), (2, 4, 6, 6, 14), False),
    "a row in numbers": (lambda: Norm(lambda y: F.layer_norm(y, (10,))), (2, 4, 6, 6, 14), False),
    "channels": (ConvNormPoolGelu, (2, 3, 6, 6, 12), False),
}


@pytest.mark.parametrize(("model", "shape", "is_free"), SIZES.values(), ids=SIZES)
def test_other_sizes_give_eagers_result_or_eagers_error(model: Callable[[], nn.Module], shape: tuple[int, ...], is_free: bool) -> None:
    gm, fused = rewritten(model(), X3)
    x = torch.randn(shape)
    if is_free:
        assert runs_fused(fused, x)
        torch.testing.assert_close(fused(x), gm(x))
        return
    with pytest.raises(RuntimeError) as expected:
        gm(x)
    with pytest.warns(UserWarning, match=UNFUSED), pytest.raises(RuntimeError) as error:
        fused(x)
    assert str(error.value) == str(expected.value)


def test_sizes_of_two_inputs_that_must_be_equal_vary_together() -> None:
    class Two(ConvGeluPool):
        def forward(self, x, y, scale):
            return super().forward(x + y) * scale

    gm = fx.symbolic_trace(Two())
    fused, _ = fxfuse.rewrite(gm, X, X, 2.0, select="always")
    x = torch.randn(7, 4, 12, 5)
    assert runs_fused(fused, x, x, 3.0)
    torch.testing.assert_close(fused(x, scale=3.0, y=x), gm(x, x, 3.0))
