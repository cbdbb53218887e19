"""The module that `rewrite` returns: it shares its state with the one it was made of, and calls under another state run that one's graph."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import ConvGeluPool, ConvNormPoolGelu, dynamo_graph, fused_nodes
from torch import fx, nn
from torch.utils._python_dispatch import TorchDispatchMode

import fxfuse
from fxfuse import library
from fxfuse.rewritten import Rewritten

pytestmark = [pytest.mark.compiler, pytest.mark.filterwarnings("error::UserWarning:fxfuse")]
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


@pytest.fixture(autouse=True)
def without_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


def step(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    torch.optim.SGD(model.parameters(), 1.0).step()


def set_parameters(model: nn.Module) -> None:
    model.inner.get_submodule("0").weight = nn.Parameter(torch.ones(6, 4, 3, 3))
    model.scale = nn.Parameter(torch.full((6, 1, 1), 3.0))


def set_data(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data + 1


STATE_CHANGES = {
    "load_state_dict": lambda model: model.load_state_dict(Scaled().state_dict()),
    "load_state_dict, assign": lambda model: model.load_state_dict(Scaled().state_dict(), assign=True),
    "new parameters": set_parameters,
    "parameters' data": set_data,
    "a step of an optimizer": step,
    "requires_grad_": lambda model: model.requires_grad_(False),
}


@pytest.mark.parametrize("of", ["the module given", "the rewritten module"])
@pytest.mark.parametrize("change", STATE_CHANGES.values(), ids=STATE_CHANGES)
def test_state_is_shared(change: Callable[[nn.Module], Any], of: str) -> None:
    gm, fused = rewritten(Scaled())
    change(gm if of == "the module given" else fused)
    assert runs_fused(fused, X)
    torch.testing.assert_close(fused(X), gm(X))
    assert all(a is b for a, b in zip(fused.parameters(), gm.parameters(), strict=True))


def test_what_is_done_to_the_model_that_was_traced_is_followed_where_the_traced_module_follows() -> None:
    model = nn.Sequential(nn.Conv2d(4, 6, 3), nn.GELU(), nn.AdaptiveAvgPool2d(1))
    gm, fused = rewritten(model)
    model.load_state_dict({"0.weight": torch.ones(6, 4, 3, 3), "0.bias": torch.zeros(6)}, assign=True)
    torch.testing.assert_close(fused(X), model(X))
    assert fused.get_submodule("0") is gm.get_submodule("0") is model[0]


def test_names_are_those_of_the_module_given() -> None:
    gm, fused = rewritten(Scaled())
    assert list(fused.state_dict()) == list(gm.state_dict())
    for names in ("named_parameters", "named_buffers", "named_modules"):
        assert [name for name, _ in getattr(fused, names)()] == [name for name, _ in getattr(gm, names)()]
    gm.register_buffer("shift", torch.zeros(1))
    gm.note = "of the module given"
    assert "shift" in fused.state_dict() and fused.note == gm.note
    with pytest.raises(AttributeError, match="nothing"):
        fused.nothing  # noqa: B018
    assert "fxfuse.gelu_pool" in fused.code and "fxfuse.gelu_pool" in fused.print_readable(print_output=False)


def test_hooks_of_the_module_given_run_once() -> None:
    gm, fused = rewritten(Scaled())
    gm.register_forward_hook(lambda module, args, result: result + 1)
    torch.testing.assert_close(fused(X), gm(X))
    with pytest.warns(UserWarning, match=UNFUSED), torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(fused(X), gm(X))


def test_a_module_given_that_was_compiled_is_compiled_for_itself() -> None:
    gm = fx.symbolic_trace(Scaled())
    gm.compile(backend="eager")
    fused, _ = fxfuse.rewrite(gm, X, select="always")
    assert runs_fused(fused, X)


def test_an_exported_module_keeps_its_checks() -> None:
    gm = torch.export.export(ConvGeluPool(), (X,), dynamic_shapes=({0: torch.export.Dim("batch")},)).module()
    fused, report = fxfuse.rewrite(gm, select="always")
    assert report.fused and runs_fused(fused, X[:1])
    torch.testing.assert_close(fused(X[:1]), gm(X[:1]))
    with pytest.raises(AssertionError, match="Guard failed"):
        fused(X[..., 1:])
    with pytest.raises(NotImplementedError, match="train"):
        fused.train()


def saved(module: nn.Module) -> nn.Module:
    torch.save(module, file := io.BytesIO())
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {"deepcopy": copy.deepcopy, "copy": copy.copy, "pickle": lambda module: pickle.loads(pickle.dumps(module)), "torch.save": saved}


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_copies_are_rewritten_modules_too(copied: Callable[[nn.Module], nn.Module]) -> None:
    gm, fused = rewritten(Scaled())
    duplicate = copied(fused)
    assert isinstance(duplicate, Rewritten) and runs_fused(duplicate, X) and runs_fused(fused, X)
    assert torch.equal(duplicate(X), fused(X))
    shared = duplicate.get_parameter("inner.0.weight") is fused.get_parameter("inner.0.weight")
    assert shared == (copied is copy.copy)
    if not shared:
        # Its guards are on modules of its own.
        duplicate.get_submodule("inner.1").register_forward_hook(lambda module, args, result: 2 * result)
        with pytest.warns(UserWarning, match=UNFUSED):
            assert not torch.allclose(duplicate(X), gm(X))
        assert runs_fused(fused, X)


def test_where_the_kernels_cannot_be_used_the_module_given_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    gm, fused = rewritten(Scaled())
    data = pickle.dumps(fused)
    monkeypatch.setattr(library, "unavailable", lambda device: "no kernels here")
    with pytest.warns(UserWarning, match="fxfuse: a rewritten module is loaded unfused: no kernels here"):
        loaded = pickle.loads(data)
    assert not isinstance(loaded, Rewritten) and torch.equal(loaded(X), gm(X))


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


def test_other_tools_see_the_fused_graph() -> None:
    gm, fused = rewritten(Scaled())
    assert fused_nodes(fx.symbolic_trace(fused).graph)
    assert fused_nodes(torch.export.export(fused, (X,)).graph)
    assert fxfuse.rewrite(fused, X, select="always")[0] is fused


def test_a_compiled_one_is_one_graph_with_the_same_guards() -> None:
    gm, fused = rewritten(Scaled())
    graphs: list[fx.Graph] = []

    def backend(captured: fx.GraphModule, _: Any) -> Callable[..., Any]:
        graphs.append(captured.graph)
        return captured.forward

    torch._dynamo.reset()
    compiled = torch.compile(fused, backend=backend, fullgraph=True)
    torch.testing.assert_close(compiled(X), gm(X))
    with warnings.catch_warnings(record=True) as warned, torch.autocast("cpu", torch.bfloat16):
        warnings.simplefilter("always")
        assert torch.equal(compiled(X), gm(X))
    compiled(X)
    assert [bool(fused_nodes(graph)) for graph in graphs] == [True, False]
    assert len([warning for warning in warned if UNFUSED in str(warning.message)]) == 1
