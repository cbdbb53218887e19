"""`fxfuse.explain`: what it reports, and that it leaves no trace: no kernel, no change to the model, the data or Dynamo."""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import ConvGeluPool, ConvNormPoolGelu, gelu_pool, reasons
from torch import nn
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import fxfuse
from fxfuse import engine, library
from fxfuse.options import OptionError
from fxfuse.places import relative
from fxfuse.report import WHY_NOT
from fxfuse.testing import assert_fused

HERE = Path(__file__).name


@pytest.fixture(autouse=True)
def libraries_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "unavailable", lambda device, build=True: None)
    monkeypatch.setenv("FXFUSE_SELECT", "always")


def image() -> torch.Tensor:
    return torch.ones(2, 4, 8, 8)


class Branching(nn.Module):
    """Two chains, a graph break between them, and statistics, buffers and plain attributes that every call changes."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(4)
        self.conv = nn.Conv2d(4, 8, 3)
        self.register_buffer("calls", torch.zeros(()))
        self.cache, self.replaced = torch.zeros(2, 4, 8, 8), torch.zeros(3)
        self.seen, self.by_name = [], {}

    @torch.compiler.disable
    def bump(self) -> None:
        """Eager code between two graphs."""
        self.calls.add_(1)
        self.cache.add_(1)

    def forward(self, x: torch.Tensor, *, scale: float = 1.0) -> torch.Tensor:
        self.calls.add_(1)
        self.cache.add_(1)
        self.replaced = self.replaced + 1
        self.seen.append(x)
        self.by_name["last"] = x
        y = gelu_pool(self.conv(self.norm(x)))
        self.bump()
        return y + gelu_pool(self.conv(x * scale))


def test_a_fused_chain_is_described() -> None:
    with torch.no_grad():
        report = fxfuse.explain(ConvNormPoolGelu(), torch.ones(2, 4, 6, 6, 12))
    (fused,) = report.fused
    assert (fused.chain, fused.op) == ("conv_norm_pool_gelu", "norm_pool_gelu")
    assert fused.shapes == "[2, 4, 6, 6, 12] -> [2, 8, 4, 4, 10] -> [2, 8, 2, 2, 5]"
    assert len(fused.nodes) == 5 and fused.choice == 'select="always"'
    file, line = fused.location.rsplit(":", 1)
    assert "self.conv(x)" in Path(file).read_text().splitlines()[int(line) - 1]
    assert (report.declined, report.graphs, report.stopped) == ([], 1, None)
    assert "avg_pool3d" in report.before[0] and "norm_pool_gelu" not in report.before[0]
    assert "norm_pool_gelu" in report.after[0] and "avg_pool3d" not in report.after[0]


@pytest.mark.parametrize("model, x", [(ConvNormPoolGelu(), torch.ones(2, 4, 6, 6, 12)), (ConvGeluPool(), image())], ids=["norm", "pool"])
def test_sizes_that_vary_stop_nothing(model: nn.Module, x: torch.Tensor) -> None:
    with torch.no_grad():
        report = assert_fused(model, (x,), {"conv_norm_pool_gelu" if x.dim() == 5 else "conv_gelu_pool": 1}, dynamic=True)
    assert report.stopped is None and report.fused[0].shapes.startswith("[s")


def test_a_declined_candidate_says_how_far_it_got_and_where() -> None:
    def run(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.gelu(torch.conv2d(x, w)).sum()

    (declined,) = fxfuse.explain(run, image(), torch.ones(8, 4, 3, 3)).declined
    assert (declined.chain, declined.reached, declined.node) == ("conv_gelu_pool", "gelu", "gelu")
    assert declined.reason.startswith("gelu is followed by sum")
    assert declined.location == f"{__file__}:{run.__code__.co_firstlineno + 1}"


def test_a_location_is_not_in_what_explain_wraps_around_a_model() -> None:
    """A model of torch's own modules has no line of the user's; a compilation finds none either."""
    with torch.no_grad():
        report = fxfuse.explain(nn.Sequential(nn.Conv2d(4, 8, 3), nn.GELU(), nn.ReLU()), image())
    assert report.declined[0].location == "" and report.declined[0].node


def test_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.no_grad():
        text = str(fxfuse.explain(Branching(), image()))
    assert text.startswith("2 fused, 0 declined in 2 graphs\n") and HERE in text and "gelu_pool" in text
    monkeypatch.setenv("FXFUSE_SELECT", "auto")
    text = str(fxfuse.explain(Branching(), image()))
    assert text.startswith("0 fused, 2 declined in 2 graphs\n") and "torch.no_grad()" in text.replace("\n", " ")
    assert text.endswith(f"\nwhat to change, sentence by sentence: {relative(WHY_NOT)}") and Path(WHY_NOT).is_file()
    assert str(fxfuse.explain(torch.relu, image())) == "0 fused, 0 declined in 1 graph"


def test_the_callers_grad_mode_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ConvGeluPool().eval()
    with monkeypatch.context() as patch:
        patch.setenv("FXFUSE_SELECT", "auto")
        assert "torch.no_grad()" in reasons(fxfuse.explain(model, image()))[0]
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            assert fxfuse.explain(model, image()).fused


def in_every_form(model: nn.Module) -> dict[str, Callable[..., Any]]:
    return {"module": model, "function": lambda x: model(x), "method": model.forward, "compiled": torch.compile(model)}


@pytest.mark.parametrize("form", ["module", "function", "method", "compiled"])
def test_nothing_is_left_behind(form: str) -> None:
    model, x = Branching(), image()
    before, attributes = copy.deepcopy(model.state_dict()), dict(vars(model))
    tensors = {name: (value, value.clone()) for name, value in attributes.items() if isinstance(value, torch.Tensor)}
    parameters = dict(model.named_parameters())
    with torch.no_grad():
        assert len(fxfuse.explain(in_every_form(model)[form], x).fused) == 2
    assert torch.equal(x, image())
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert all(value is parameters[name] for name, value in model.named_parameters())
    for name, (value, data) in tensors.items():
        assert getattr(model, name) is value, name
        assert torch.equal(value, data), name
    assert (model.seen, model.by_name) == ([], {})


class CompiledWithin(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(torch.compile(ConvGeluPool()))
        self.plain = ConvGeluPool()
        self.plain.compile()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.block(x)
        torch._dynamo.graph_break()
        return y + self.plain(x)


@pytest.mark.parametrize(
    "make", [CompiledWithin, lambda: torch.compile(CompiledWithin()), lambda: nn.Sequential(torch.compile(ConvGeluPool()))]
)
def test_models_that_are_compiled_in_part(make: Callable[[], nn.Module]) -> None:
    """Compiled code must not run on fake tensors: it would read memory that is not there."""
    model = make()
    children = dict(model.named_modules())
    with torch.no_grad():
        assert fxfuse.explain(model, image()).fused
    assert dict(model.named_modules()) == children


def test_scripted_parts_are_no_obstacle() -> None:
    scripted = torch.jit.trace(nn.ReLU(), image())
    with torch.no_grad():
        report = fxfuse.explain(nn.Sequential(scripted, ConvGeluPool()), image())
    assert report.fused


def test_explaining_again_and_other_sizes_gives_the_same_answer() -> None:
    model = Branching()
    with torch.no_grad():
        reports = [fxfuse.explain(model, torch.ones(n, 4, 8, 8)) for n in (2, 3, 12)]
    assert {(len(report.fused), report.graphs) for report in reports} == {(2, 2)}
    assert reports[-1].fused[0].shapes == "[12, 4, 8, 8] -> [12, 8, 6, 6] -> [12, 8, 1, 1]"


def test_no_counters_and_no_records_of_real_compilations() -> None:
    counters.clear()
    kept = len(fxfuse.reports())
    with torch.no_grad():
        fxfuse.explain(ConvGeluPool(), image())
    assert not counters["fxfuse"] and not counters["fxfuse_declined"] and len(fxfuse.reports()) == kept


NEEDS_DATA = {
    "if": lambda y: y * 2 if y.sum() > 0 else y,
    "item": lambda y: y * y.sum().item(),
    "tolist": lambda y: y * y.flatten().tolist()[0],
    "int": lambda y: y * int(y.sum()),
}


@pytest.mark.parametrize("read", NEEDS_DATA.values(), ids=NEEDS_DATA)
def test_a_model_that_needs_data_keeps_what_it_has_and_names_the_line(read: Callable[[torch.Tensor], torch.Tensor]) -> None:
    model = ConvGeluPool()

    def run(x: torch.Tensor) -> torch.Tensor:
        y = model(x)
        torch._dynamo.graph_break()
        y = read(y)
        return model(x * y.sum())

    with torch.no_grad():
        report = fxfuse.explain(run, image())
    assert len(report.fused) == 1
    assert report.stopped.startswith("the model needs the data of a tensor at ") and f"{HERE}:" in report.stopped
    assert f"stopped: {report.stopped}" in str(report)


class Disabled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.chain = ConvGeluPool()

    @torch.compiler.disable
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.chain(x)


class BreaksInWith(Disabled):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with open(os.devnull):
            torch._dynamo.graph_break()
            return F.adaptive_avg_pool2d(F.gelu(self.chain.conv(x)), 1)


class Counting(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def variable(name: str) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(name, "1")
        yield


@contextlib.contextmanager
def errors_suppressed() -> Iterator[None]:
    def fail(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("a defect")

    with pytest.MonkeyPatch.context() as patch, torch._dynamo.config.patch(suppress_errors=True):
        patch.setattr(engine, "fuse", fail)
        yield


def stance(*args: str, **kwargs: str) -> Callable[[], AbstractContextManager[None]]:
    return lambda: torch.compiler.set_stance(*args, **kwargs)


# name -> the model, what is around the call, and what the sentence names.
UNCAPTURED: dict[str, tuple[Callable[[], Callable[..., Any]], Callable[[], AbstractContextManager[Any]], str]] = {
    "TORCHDYNAMO_DISABLE": (ConvGeluPool, lambda: variable("TORCHDYNAMO_DISABLE"), "TORCHDYNAMO_DISABLE=1 turns"),
    "config": (ConvGeluPool, lambda: torch._dynamo.config.patch(disable=True), "torch._dynamo.config.disable turns"),
    "force_eager": (ConvGeluPool, stance("force_eager"), 'torch.compiler.set_stance("force_eager") turns'),
    "eager_on_recompile": (ConvGeluPool, stance("eager_on_recompile"), 'torch.compiler.set_stance("eager_on_recompile") turns'),
    "fail_on_recompile": (ConvGeluPool, stance("fail_on_recompile"), 'torch.compiler.set_stance("fail_on_recompile") turns'),
    "force_backend": (ConvGeluPool, stance(force_backend="eager"), "torch.compiler.set_stance(force_backend='eager') turns"),
    "a dispatch mode": (ConvGeluPool, Counting, "Counting turns"),
    "a disabled forward": (Disabled, contextlib.nullcontext, "torch.compiler.disable on the model's forward turns"),
    "a disabled method": (lambda: Disabled().forward, contextlib.nullcontext, "torch.compiler.disable on the model's forward turns"),
    "a disabled child": (lambda: nn.Sequential(torch.compiler.disable(ConvGeluPool())), contextlib.nullcontext, "Dynamo captured no graph"),
    "a break that cannot be resumed": (BreaksInWith, contextlib.nullcontext, "Dynamo captured no graph"),
    "suppressed errors": (ConvGeluPool, errors_suppressed, "Dynamo captured no graph"),
    "no op": (nn.Identity, contextlib.nullcontext, "Dynamo captured no graph"),
}


@pytest.mark.parametrize("case", UNCAPTURED.values(), ids=UNCAPTURED)
def test_no_graph_is_a_stop_and_no_expectation_holds(case: tuple[Any, Any, str]) -> None:
    make, around, sentence = case
    torch._dynamo.reset()
    with torch.no_grad(), around():
        report = fxfuse.explain(make(), image())
        for times in (0, 1):
            with pytest.raises(AssertionError) as failed:
                assert_fused(make(), (image(),), {"conv_gelu_pool": times})
            assert f"found no graph: stopped: {report.stopped}" in str(failed.value)
    assert report.graphs == 0 and report.stopped.startswith(sentence)
    assert str(report) == f"0 fused, 0 declined in 0 graphs\n\nstopped: {report.stopped}"


@pytest.mark.parametrize("given", [stance("eager_then_compile"), stance("aot_eager_then_compile"), stance(force_backend="fxfuse")])
def test_stances_that_compile_in_the_end_are_no_obstacle(given: Callable[[], AbstractContextManager[None]]) -> None:
    with torch.no_grad(), given():
        assert len(assert_fused(Branching(), image(), {"conv_gelu_pool": 2}).before) == 2
        assert torch._dynamo.eval_frame._stance != torch._dynamo.eval_frame.DynamoStance(), "the caller's stance was lost"


def test_what_is_disabled_is_what_torch_compile_leaves_out() -> None:
    """torch.compile looks through `disable` around a function or model that it is given."""
    model = ConvGeluPool()
    with torch.no_grad():
        for given in (torch.compiler.disable(lambda x: model(x)), torch.compiler.disable(ConvGeluPool())):
            assert fxfuse.explain(given, image()).fused


def test_what_the_model_raises_is_raised() -> None:
    def run(x: torch.Tensor) -> torch.Tensor:
        raise ValueError("the model's own")

    with pytest.raises(ValueError, match="the model's own"):
        fxfuse.explain(run, image())
    with pytest.raises(Exception, match="channels"):
        fxfuse.explain(ConvGeluPool(), torch.ones(2, 5, 8, 8))


def test_options_come_from_the_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.no_grad():
        monkeypatch.setenv("FXFUSE_SELECT", "never")
        monkeypatch.setenv("FXFUSE_STRICT", "1")  # explain shows; it does not raise
        assert reasons(fxfuse.explain(ConvGeluPool(), image())) == ['fxfuse.select is "never"']
        monkeypatch.setenv("FXFUSE_PASSES", "conv_norm_pool_gelu")
        assert not fxfuse.explain(ConvGeluPool(), image()).declined
        monkeypatch.setenv("FXFUSE_SELECT", "often")
        with pytest.raises(OptionError):
            fxfuse.explain(ConvGeluPool(), image())


def test_a_missing_library_is_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(library, "unavailable", lambda device, build=True: f"no kernels for {device} today")
    with torch.no_grad():
        assert reasons(fxfuse.explain(ConvGeluPool(), image())) == ["no kernels for cpu today"]


def test_keyword_and_nested_arguments() -> None:
    def run(batch: dict[str, Any], *, flag: bool) -> torch.Tensor:
        return batch["model"](batch["images"][0]) if flag else batch["images"][0]

    batch = {"images": [image()], "model": ConvGeluPool()}
    with torch.no_grad():
        assert fxfuse.explain(run, batch, flag=True).fused
        assert not fxfuse.explain(run, batch, flag=False).fused
    assert type(batch["images"][0]) is torch.Tensor


@torch.compiler.nested_compile_region
def region(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x)


# By its name, for explain puts back what a function itself holds.
SHAPES: list[torch.Size] = []
BODIES = {
    "checkpoint": lambda model, x: checkpoint(model, x, use_reentrant=False),
    "cond": lambda model, x: torch.cond(x.sum() > 0, model, lambda x: model(x) * 2, (x,)),
    "nested_compile_region": lambda model, x: region(model, x) + region(model, x * 2),
}


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("run", BODIES.values(), ids=BODIES)
def test_bodies_of_higher_order_ops_are_explained(run: Callable[[nn.Module, torch.Tensor], torch.Tensor], grad: bool) -> None:
    """What runs behind the capture goes through these ops on fake tensors."""
    model = ConvGeluPool()
    SHAPES.clear()
    with torch.set_grad_enabled(grad):
        report = fxfuse.explain(lambda x: SHAPES.append(run(model, x).shape) or x, image())
    assert SHAPES == [(2, 8, 1, 1)] and report.stopped is None
    assert report.fused and not report.declined and all(fused.body for fused in report.fused)
    assert "torch.ops.fxfuse.gelu_pool" in report.after[0] and "fxfuse" not in report.before[0]
