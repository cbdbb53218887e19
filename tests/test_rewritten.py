"""The module that `rewrite` returns: it shares its state with the one it was made of, in copies and other tools too."""

from __future__ import annotations

import copy
import io
import pickle
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from models import ConvGeluPool, fused_nodes
from rewritten_modules import UNFUSED, Scaled, X, rewritten, runs_fused
from torch import fx, nn

import fxfuse
from fxfuse import library
from fxfuse.rewritten import Rewritten

pytestmark = [pytest.mark.compiler, pytest.mark.filterwarnings("error::UserWarning:fxfuse")]


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
