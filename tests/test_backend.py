"""The backend's own work, with Inductor's compiler replaced by eager: options, what graph goes on, failures, records. Nothing is compiled here."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.compile_fx
from models import ConvGeluPool, ConvNormPoolGelu, fused_nodes, reasons
from torch import fx, nn
from torch._dynamo.exc import BackendCompilerFailed, TensorifyScalarRestartAnalysis
from torch._dynamo.utils import counters

import fxfuse
from fxfuse import backend, engine
from fxfuse.options import OptionError
from fxfuse.report import KEPT_REPORTS

pytestmark = pytest.mark.compiler

ALWAYS = {"fxfuse.select": "always"}
MODES = list(torch._inductor.list_mode_options())


@dataclasses.dataclass
class InductorCall:
    """What Inductor was asked to compile."""

    gm: fx.GraphModule
    graph: fx.Graph
    config: dict[str, Any]


@pytest.fixture
def inductor_calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[InductorCall]]:
    """Inductor's checks of modes and options are its own; what would be compiled is run eagerly."""
    calls: list[InductorCall] = []

    def compile_fx(gm: fx.GraphModule, _: Any, config_patches: dict[str, Any], **__: Any) -> Callable[..., Any]:
        calls.append(InductorCall(gm, gm.graph, config_patches))
        return gm.forward

    monkeypatch.setattr(torch._inductor.compile_fx, "compile_fx", compile_fx)
    return calls


@pytest.fixture
def given_graphs(monkeypatch: pytest.MonkeyPatch) -> list[fx.Graph]:
    """The graphs that Dynamo handed over, before fxfuse did anything."""
    graphs: list[fx.Graph] = []
    whole = backend.fuse_in_place

    def noting(gm: fx.GraphModule, *own: Any) -> Any:
        graphs.append(gm.graph)
        return whole(gm, *own)

    monkeypatch.setattr(backend, "fuse_in_place", noting)
    return graphs


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    torch._dynamo.reset()
    counters.clear()
    with torch.no_grad():
        yield


def image() -> torch.Tensor:
    return torch.randn(2, 4, 8, 8)


def call(model: Callable[..., Any] | None = None, x: torch.Tensor | None = None, **options: Any) -> torch.Tensor:
    """The result of one compiled call with these options, checked against eager."""
    model, x = model or ConvGeluPool(), image() if x is None else x
    result = torch.compile(model, backend="fxfuse", **options)(x)
    torch.testing.assert_close(result, model(x))
    return result


def test_is_listed_and_needs_no_registration() -> None:
    assert "fxfuse" in torch._dynamo.list_backends()


def test_the_module_is_the_backend_too(inductor_calls, monkeypatch):
    """As the string: options, the checks of them, and what `torch._dynamo.reset()` asks for."""
    x, model = image(), ConvGeluPool()
    for options, ops in ((ALWAYS, 1), ({"fxfuse.mode": "max-autotune", "fxfuse.select": "never"}, 0), (None, 0)):
        torch._dynamo.reset()
        torch.testing.assert_close(torch.compile(model, backend=fxfuse, options=options)(x), model(x))
        assert len(fused_nodes(inductor_calls[-1].graph)) == ops
    assert inductor_calls[1].config == torch._inductor.list_mode_options("max-autotune")
    torch._dynamo.reset()
    torch.compile(model, backend=fxfuse, mode="max-autotune-no-cudagraphs")(x)
    assert inductor_calls[-1].config == torch._inductor.list_mode_options("max-autotune-no-cudagraphs")
    with pytest.raises(BackendCompilerFailed, match="unknown option 'fxfuse.selct'"):
        torch._dynamo.reset()
        torch.compile(model, backend=fxfuse, options={"fxfuse.selct": 1})(x)
    resets: list[int] = []
    monkeypatch.setattr(backend.fxfuse, "reset", lambda: resets.append(1))
    for given in ("fxfuse", fxfuse):
        torch._dynamo.reset()
        resets.clear()
        torch.compile(model, backend=given)(x)
        torch._dynamo.reset()
        assert resets == [1], given


def test_the_rewritten_graph_goes_to_inductor_and_is_counted(inductor_calls, given_graphs):
    call(options=ALWAYS)
    assert len(fused_nodes(inductor_calls[0].graph)) == 1
    assert inductor_calls[0].graph is not given_graphs[0]
    assert dict(counters["fxfuse"]) == {"conv_gelu_pool": 1} and not counters["fxfuse_declined"]
    assert fxfuse.reports()[-1].fused[0].op == "gelu_pool"


@pytest.mark.parametrize("options", [{"fxfuse.select": "never"}, {"fxfuse.passes": ["conv_norm_pool_gelu"]}])
def test_a_graph_with_nothing_to_fuse_goes_to_inductor_as_it_is(inductor_calls, given_graphs, options):
    call(options=options)
    assert inductor_calls[0].graph is given_graphs[0]
    assert not counters["fxfuse"]


def test_never_is_a_reason(inductor_calls):
    call(options={"fxfuse.select": "never"})
    assert reasons(fxfuse.reports()[-1]) == ['fxfuse.select is "never"']
    assert dict(counters["fxfuse_declined"]) == {"conv_gelu_pool": 1}


def test_a_recompile_counts_again(inductor_calls):
    model = ConvGeluPool()
    compiled = torch.compile(model, backend="fxfuse", options=ALWAYS, dynamic=False)
    for batch in (1, 2, 1):
        compiled(torch.randn(batch, 4, 8, 8))
    assert counters["fxfuse"]["conv_gelu_pool"] == 2


@pytest.mark.parametrize("mode", MODES)
def test_every_inductor_mode_goes_through(inductor_calls, mode):
    expected = torch._inductor.list_mode_options(mode)
    call(options={"fxfuse.mode": mode, "fxfuse.select": "never"})
    call(nn.ReLU(), mode=mode)
    call(options={"fxfuse.mode": mode, **ALWAYS})
    assert [made.config for made in inductor_calls] == [expected] * 3
    assert len(fused_nodes(inductor_calls[-1].graph)) == 1


def test_inductors_options_go_through_and_fxfuses_do_not(inductor_calls):
    call(options={"max_autotune": False, "triton.cudagraphs": False, **ALWAYS})
    assert inductor_calls[0].config == {"max_autotune": False, "triton.cudagraphs": False}
    assert len(fused_nodes(inductor_calls[0].graph)) == 1


REFUSED = [
    ({"options": {"fxfuse.selct": "always"}}, "unknown option 'fxfuse.selct'; the nearest is 'fxfuse.select'"),
    ({"options": ["fxfuse.select"]}, "options=.* is of type list, not a mapping; give names and values"),
    ({"options": "fxfuse.select"}, "options='fxfuse.select' is of type str, not a mapping"),
    ({"options": {3: 4}}, "options has the key 3 of type int, and keys are strings"),
    ({"options": {"fxfuse": {"select": "always"}}}, "unknown option 'fxfuse'; each option has a key of its own: fxfuse.select, "),
    ({"options": {"fxfuse.select": "sometimes"}}, "fxfuse.select='sometimes' is not one of auto, always, tail, never"),
    ({"options": {"fuse": 1}}, "Unexpected optimization option fuse"),
    ({"options": {"max_autotune": "yes"}}, "Unexpected type of attr max_autotune"),
    ({"options": {"fxfuse.mode": "fastest"}}, "fastest"),
    ({"mode": "fastest"}, "fastest"),
]


@pytest.mark.parametrize(("options", "sentence"), REFUSED)
def test_bad_options_are_errors(inductor_calls, options, sentence):
    with pytest.raises(BackendCompilerFailed, match=sentence):
        call(**options)
    assert not inductor_calls


def test_a_bad_variable_is_an_error(inductor_calls, monkeypatch):
    monkeypatch.setenv("FXFUSE_SELECT", "sometimes")
    with pytest.raises(BackendCompilerFailed, match="FXFUSE_SELECT='sometimes'") as raised:
        call()
    assert isinstance(raised.value.inner_exception, OptionError)


def test_a_graph_that_needs_grad_is_declined_with_the_way_out(inductor_calls, given_graphs):
    with torch.enable_grad():
        call(ConvGeluPool().eval())
    (reason,) = reasons(fxfuse.reports()[-1])
    assert "torch.no_grad()" in reason and "model.eval() alone does not turn gradients off" in reason
    assert inductor_calls[0].graph is given_graphs[0]


def test_strict_raises_the_sentence(inductor_calls):
    with torch.enable_grad(), pytest.raises(BackendCompilerFailed, match=r"conv_gelu_pool at .*models.py:\d+ \(conv\): .*torch.no_grad\(\)"):
        call(options={"fxfuse.strict": True})
    assert not inductor_calls


def test_strict_is_content_where_all_candidates_are_fused(inductor_calls):
    call(options={"fxfuse.strict": True, **ALWAYS})
    call(nn.Conv2d(4, 8, 3), options={"fxfuse.strict": True, **ALWAYS})  # a convolution alone is no candidate


@pytest.fixture
def broken_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    def requires(**_: Any) -> Iterator[tuple[bool, str]]:
        raise ZeroDivisionError("a defect in a pass")

    broken = tuple(dataclasses.replace(chain, requires=requires) for chain in engine.chains())
    monkeypatch.setattr(engine, "chains", lambda: broken)


def test_an_exception_in_a_pass_is_why_its_chain_is_declined(inductor_calls, given_graphs, broken_pass, caplog):
    with caplog.at_level(logging.DEBUG, logger="fxfuse"):
        call(options=ALWAYS)
    assert inductor_calls[0].graph is given_graphs[0] and not fused_nodes(given_graphs[0])
    (record,) = [record for record in caplog.records if record.name.startswith("fxfuse") and record.levelno > logging.INFO]
    assert record.levelno == logging.ERROR and "ZeroDivisionError: a defect in a pass" in caplog.text
    assert "conv_gelu_pool: its requires at " in reasons(fxfuse.reports()[-1])[0]
    assert dict(counters["fxfuse_declined"]) == {"conv_gelu_pool": 1} and not counters["fxfuse"]


@pytest.fixture
def broken_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    def find(*_: Any) -> Iterator[Any]:
        raise ZeroDivisionError("a defect in fxfuse")

    monkeypatch.setattr(engine, "find", find)


def test_an_exception_in_the_engine_leaves_the_graph_as_it_was(inductor_calls, given_graphs, broken_engine, caplog):
    with caplog.at_level(logging.DEBUG, logger="fxfuse"):
        call(options=ALWAYS)
    assert inductor_calls[0].graph is given_graphs[0] and not fused_nodes(given_graphs[0])
    (record,) = [record for record in caplog.records if record.name.startswith("fxfuse") and record.levelno > logging.INFO]
    assert record.levelno == logging.ERROR and "ZeroDivisionError: a defect in fxfuse" in caplog.text
    assert "ZeroDivisionError" in fxfuse.reports()[-1].stopped
    assert not counters["fxfuse"]


def test_an_exception_in_a_pass_is_raised_under_strict(inductor_calls, broken_pass):
    with pytest.raises(BackendCompilerFailed, match="a defect in a pass"):
        call(options={"fxfuse.strict": True, **ALWAYS})


@pytest.fixture
def picky_inductor(monkeypatch: pytest.MonkeyPatch) -> None:
    """An Inductor that does not compile what fxfuse made."""

    def compile_fx(gm: fx.GraphModule, *_: Any, **__: Any) -> Callable[..., Any]:
        if fused_nodes(gm.graph):
            raise RuntimeError("no lowering")
        return gm.forward

    monkeypatch.setattr(torch._inductor.compile_fx, "compile_fx", compile_fx)


def test_a_rewritten_graph_that_inductor_refuses_is_compiled_as_it_was(picky_inductor, caplog):
    call(options=ALWAYS)
    assert len([record for record in caplog.records if record.name.startswith("fxfuse")]) == 1 and "no lowering" in caplog.text
    assert not counters["fxfuse"] and fxfuse.reports()[-1].stopped
    torch._dynamo.reset()
    with pytest.raises(BackendCompilerFailed, match="no lowering"):
        call(options={"fxfuse.strict": True, **ALWAYS})


def test_an_exception_of_inductors_own_is_raised_once_and_not_logged(inductor_calls, monkeypatch, caplog):
    def compile_fx(*_: Any, **__: Any) -> Callable[..., Any]:
        raise RuntimeError("not for any graph")

    monkeypatch.setattr(torch._inductor.compile_fx, "compile_fx", compile_fx)
    with pytest.raises(BackendCompilerFailed, match="not for any graph"):
        call(nn.ReLU())
    assert not [record for record in caplog.records if record.name.startswith("fxfuse")]


@pytest.fixture
def record_of(tmp_path: Path) -> Callable[[], dict[str, Any]]:
    """What the dump in `tmp_path` says of its only graph."""
    return lambda: json.loads(next(tmp_path.glob("*/report.json")).read_text())


def test_where_the_original_graph_fails_too_that_is_what_is_raised(inductor_calls, tmp_path, record_of, monkeypatch, caplog):
    """As without fxfuse: nothing of ours in the log, in the exception's context or in the counters."""

    def compile_fx(gm: fx.GraphModule, *_: Any, **__: Any) -> Callable[..., Any]:
        raise RuntimeError("not with the op" if fused_nodes(gm.graph) else "not for any graph")

    monkeypatch.setattr(torch._inductor.compile_fx, "compile_fx", compile_fx)
    kept = fxfuse.reports()
    with pytest.raises(BackendCompilerFailed, match="not for any graph") as raised:
        call(options={"fxfuse.dump": str(tmp_path), **ALWAYS})
    error: BaseException | None = raised.value
    while error is not None:
        assert "not with the op" not in str(error)
        error = error.__cause__ or error.__context__
    assert not [record for record in caplog.records if record.name.startswith("fxfuse")]
    assert not counters["fxfuse"] and not counters["fxfuse_declined"] and fxfuse.reports() == kept
    assert (record_of()["fused"], record_of()["stopped"]) == ([], "RuntimeError: not for any graph")


def test_a_restart_that_only_the_original_asks_for_is_one(inductor_calls, monkeypatch, caplog):
    """Dynamo traces once more; the graph that it brings then is compiled and reported as any other."""
    asked: list[bool] = []

    def compile_fx(gm: fx.GraphModule, *_: Any, **__: Any) -> Callable[..., Any]:
        if fused_nodes(gm.graph):
            raise RuntimeError("not with the op")
        if not asked:
            asked.append(True)
            raise TensorifyScalarRestartAnalysis
        return gm.forward

    monkeypatch.setattr(torch._inductor.compile_fx, "compile_fx", compile_fx)
    call(options=ALWAYS)
    assert [record.levelno for record in caplog.records if record.name == "fxfuse.backend"] == [logging.ERROR]
    assert fxfuse.reports()[-1].stopped.startswith("Inductor does not compile the graph with conv_gelu_pool fused")


def test_a_missing_library_is_told_and_the_model_runs(inductor_calls, given_graphs, monkeypatch):
    monkeypatch.setattr(engine, "fuse", partial(engine.fuse, unavailable=lambda device: f"no kernels for {device} today"))
    call(options=ALWAYS)
    assert reasons(fxfuse.reports()[-1]) == ["no kernels for cpu today"]
    assert inductor_calls[0].graph is given_graphs[0]
    torch._dynamo.reset()
    with pytest.raises(BackendCompilerFailed, match="no kernels for cpu today"):
        call(options={"fxfuse.strict": True, **ALWAYS})


def test_records_are_bounded(inductor_calls):
    gm = fx.symbolic_trace(nn.Identity())
    for _ in range(KEPT_REPORTS + 3):
        backend.fxfuse(gm, [torch.ones(1)])
    kept = fxfuse.reports()
    assert len(kept) == KEPT_REPORTS
    call(options=ALWAYS)
    assert fxfuse.reports()[:-1] == kept[1:] and fxfuse.reports()[-1].fused


def test_graphs_on_both_sides_of_a_break_are_two_records(inductor_calls):
    model = ConvGeluPool()

    def run(x: torch.Tensor) -> torch.Tensor:
        y = model(x)
        torch._dynamo.graph_break()
        return model(y.expand(2, 8, 8, 8)[:, :4])

    before = len(fxfuse.reports())
    call(run, options=ALWAYS)
    assert [len(report.fused) for report in fxfuse.reports()[before:]] in ([1, 1], [])
    assert counters["fxfuse"]["conv_gelu_pool"] == 2


def test_the_model_stays_as_it_was(inductor_calls):
    for model, x in ((ConvGeluPool(), image()), (ConvNormPoolGelu(), torch.randn(2, 4, 6, 6, 12))):
        modules, state = list(model.modules()), {name: (tensor, tensor.clone()) for name, tensor in model.state_dict(keep_vars=True).items()}
        call(model, x, options=ALWAYS)
        assert list(model.modules()) == modules
        assert list(model.state_dict()) == list(state)
        for name, tensor in model.state_dict(keep_vars=True).items():
            assert tensor is state[name][0] and torch.equal(tensor, state[name][1]) and tensor.requires_grad
