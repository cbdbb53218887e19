"""In-place writes of every kind, at every place of both chains, to everything a chain reads: the rewritten graph does what eager does."""

from __future__ import annotations

import dataclasses
import linecache
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from write_kinds import SCOPE, Modules, kinds

import fxfuse
from fxfuse import engine
from fxfuse.options import Options

pytestmark = pytest.mark.compiler

# A value's error through a chain in fp32; a write that is missed or seen too early is thousands of times as much.
CLOSE = {"rtol": 1e-4, "atol": 1e-5, "equal_nan": True}


@dataclasses.dataclass(frozen=True)
class Chain:
    """A chain as lines of a program. inputs: shapes of its arguments. steps: name, expression and shape of each op. state: what of the module's
    state it reads, with shapes."""

    inputs: Mapping[str, tuple[int, ...]]
    steps: tuple[tuple[str, str, tuple[int, ...]], ...]
    state: Mapping[str, tuple[int, ...]] = dataclasses.field(default_factory=dict)

    def targets(self, place: int) -> list[str]:
        """What can be written to in front of the step of that number."""
        return [*self.inputs, *self.state, *(name for name, _, _ in self.steps[:place])]

    def shape(self, target: str) -> tuple[int, ...]:
        return {**self.inputs, **self.state, **{name: shape for name, _, shape in self.steps}}[target]


X2, Y2, X3, Y3, P3 = (2, 3, 6, 6), (2, 4, 4, 4), (2, 2, 5, 5, 5), (2, 4, 4, 4, 4), (2, 4, 2, 2, 2)
W2, W3, ROWS = (4, 3, 3, 3), (4, 2, 2, 2, 2), (4, 4, 4, 4)  # normalised over all but the batch, so that bias and addend do not cancel
NORM_INPUTS = {"x": X3, "w": W3, "b": (4,), "a": ROWS, "scale": ROWS, "shift": ROWS}
CONV3, NORM = ("y", "torch.conv3d(x, w, b)", Y3), ("n", f"F.layer_norm(z, {ROWS}, scale, shift)", Y3)
CHAINS = {
    "conv_gelu_pool": Chain(
        {"x": X2, "w": W2, "b": (4,)}, (("y", "torch.conv2d(x, w, b)", Y2), ("g", "F.gelu(y)", Y2), ("p", "F.adaptive_avg_pool2d(g, 1)", (2, 4, 1, 1)))
    ),
    "conv_norm_pool_gelu": Chain(NORM_INPUTS, (CONV3, ("z", "y + a", Y3), NORM, ("p", "F.avg_pool3d(n, 2)", P3), ("g", "F.gelu(p)", P3))),
    "conv_norm_pool_gelu in place": Chain(
        NORM_INPUTS, (CONV3, ("z", "y.add_(a)", Y3), NORM, ("p", "F.avg_pool3d(n, 2)", P3), ("g", "aten.gelu_.default(p)", P3))
    ),
    # Through ops that hand a value on, in memory of its own or not, and a mean in steps.
    "conv_gelu_pool with identities": Chain(
        {"x": X2, "w": W2, "b": (4,)},
        (
            ("y", "torch.conv2d(x, w, b)", Y2),
            ("d", "F.dropout(y, 0.5, False)", Y2),
            ("g", "F.gelu(d)", Y2),
            ("c", "g.clone().contiguous()", Y2),
            ("f", "c.flatten(2)", (2, 4, 16)),
            ("p", "f.mean(-1)", (2, 4)),
        ),
    ),
    "conv_gelu_pool by hand": Chain(
        {"x": X2, "w": W2, "b": (4,)},
        (
            ("y", "torch.conv2d(x, w, b)", Y2),
            ("h", "y * 0.5", Y2),
            ("e", "1 + torch.erf(y / 2**0.5)", Y2),
            ("g", "h * e", Y2),
            ("s", "g.sum((2, 3))", (2, 4)),
            ("p", "s / 16", (2, 4)),
        ),
    ),
    "conv_norm_pool_gelu of modules": Chain(
        {"x": X3},
        (
            ("y", "self.conv(x)", Y3),
            ("z", "y + self.addend", Y3),
            ("n", "self.norm(z)", Y3),
            ("p", "self.pool(n)", P3),
            ("g", "self.gelu(p)", P3),
        ),
        {"self.conv.weight": W3, "self.conv.bias": (4,), "self.addend": ROWS, "self.norm.weight": ROWS},
    ),
}


class Model(Modules):
    """What programs are methods of."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.pool, self.gelu = nn.Conv3d(2, 4, 2), nn.LayerNorm(ROWS), nn.AvgPool3d(2), nn.GELU()
        self.addend = nn.Parameter(torch.randn(ROWS))


@dataclasses.dataclass(frozen=True)
class Case:
    """A chain with one write: of a kind, in front of the step of that number (or behind the last), to a target."""

    chain: str
    early: str
    line: str
    place: int
    target: str

    def source(self) -> str:
        chain = CHAINS[self.chain]
        shape = chain.shape(self.target)
        same_shape = f"r[:{math.prod(shape)}].view({shape})"
        names = {"t": self.target, "u": same_shape, "m": f"({same_shape} > 0)", "i": "i"}
        early = [f"early = {self.early.format(**names)}"] if self.early else []
        lines = list(early) if self.target in (*chain.inputs, *chain.state) else []
        for index, (name, expression, _) in enumerate(chain.steps):
            lines += [self.line.format(**names)] if index == self.place else []
            lines += [f"{name} = {expression}", *(early if name == self.target else [])]
        lines += [self.line.format(**names)] if self.place == len(chain.steps) else []
        body = "\n".join(f"    {line}" for line in (*lines, f"return {chain.steps[-1][0]}"))
        return f"def forward(self, {', '.join(chain.inputs)}, r, i):\n{body}\n"

    def model(self) -> nn.Module:
        """A module of this program, with the same weights each time."""
        source = self.source()
        name = f"<{source}>"
        linecache.cache[name] = (len(source), None, source.splitlines(True), name)
        scope = dict(SCOPE)
        exec(compile(source, name, "exec"), scope)
        torch.manual_seed(1)
        return type("Program", (Model,), {"forward": scope["forward"]})()

    def arguments(self) -> list[torch.Tensor]:
        """Fresh arguments, the same each time."""
        generator = torch.Generator().manual_seed(0)
        shapes = (*CHAINS[self.chain].inputs.values(), (1000,))
        return [*(torch.randn(shape, generator=generator) for shape in shapes), torch.tensor([1, 0])]

    def results(self, model: nn.Module, call: Callable[..., Any]) -> list[torch.Tensor]:
        """What a call returns, and all that it may have written to."""
        args = self.arguments()
        torch.manual_seed(2)
        return [call(*args), *args, *model.state_dict().values()]


def cases() -> Iterator[Case]:
    """Every chain with every kind of write at every place to every target."""
    for name, chain in CHAINS.items():
        for early, line in kinds():
            for place in range(len(chain.steps) + 1):
                yield from (Case(name, early, line, place, target) for target in chain.targets(place))


class AllLeaves(fx.Tracer):
    """Keeps calls of all modules, the user's own too."""

    def is_leaf_module(self, module: nn.Module, name: str) -> bool:
        return not isinstance(module, nn.Sequential)


def by_symbolic_trace(case: Case, fuses: bool) -> tuple[list[torch.Tensor], int]:
    """Results of the traced program, rewritten if `fuses`, and how many chains were fused."""
    model = case.model()
    gm, fused = fx.GraphModule(model, AllLeaves().trace(model)), 0
    if fuses:
        gm, report = fxfuse.rewrite(gm, *case.arguments(), select="always")
        fused = len(report.fused)
    return case.results(model, gm), fused


def by_dynamo(case: Case, fuses: bool) -> tuple[list[torch.Tensor], int]:
    """The same of what `torch.compile` captures."""
    fused = []

    def backend(gm: fx.GraphModule, _: Any) -> Callable[..., Any]:
        graph, report = engine.fuse(gm.graph, Options(select="always")) if fuses else (gm.graph, fxfuse.Report())
        fused.extend(report.fused)
        return fx.GraphModule(gm, graph).forward

    model = case.model()
    return case.results(model, torch.compile(model, backend=backend, dynamic=False)), len(fused)


def are_same(results: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return all(
        (one.shape, one.stride(), one.dtype) == (other.shape, other.stride(), other.dtype) and torch.allclose(one, other, **CLOSE)
        for one, other in zip(results, expected, strict=True)
    )


def verdict(case: Case, capture: Callable[..., tuple[list[torch.Tensor], int]]) -> str:
    """What becomes of a case. "eager refuses" and "the tracer ..." say nothing of fxfuse."""
    model = case.model()
    try:
        expected = case.results(model, model)
    except Exception:
        return "eager refuses"
    try:
        results, fused = capture(case, fuses=True)
        if are_same(results, expected):
            return "fused" if fused else "declined"
        failure = "wrong values"
    except Exception as error:
        failure = f"{type(error).__name__}: {error}"
    try:
        results, _ = capture(case, fuses=False)
    except Exception:
        return "the tracer refuses"
    return failure if are_same(results, expected) else "the tracer loses the write"


def swept(capture: Callable[..., tuple[list[torch.Tensor], int]], stride: int) -> Counter[str]:
    """Verdicts of every stride-th case; fails with the programs that the rewritten graph does not do as eager does."""
    verdicts: Counter[str] = Counter()
    failed = []
    for index, case in enumerate(islice(cases(), 0, None, stride)):
        if index % 100 == 0:
            torch._dynamo.reset()
        found = verdict(case, capture)
        told = found in ("fused", "declined") or found.startswith(("eager ", "the tracer "))
        verdicts[found if told else "failed"] += 1
        failed += [] if told else [f"{case.chain}, {case.line!r} to {case.target} in front of step {case.place}: {found}\n{case.source()}"]
    assert not failed, f"{len(failed)} of {verdicts.total()} cases:\n" + "\n".join(failed[:20])
    return verdicts


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tensors of a few hundred elements need no second thread. Dynamo flushes the caches to time its guards, a third of each capture."""
    monkeypatch.setattr("torch._dynamo.guards.profile_guard_manager", lambda *_: 0.0, raising=False)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with torch.no_grad():
        yield
    torch.set_num_threads(threads)


def test_the_table_is_no_small_one() -> None:
    assert len({line for _, line in kinds()}) >= 200


# Strides that share no factor with the number of places and targets, so that each kind meets ever other ones.
@pytest.mark.parametrize(
    ("capture", "stride", "counted", "fused"),
    [
        (by_symbolic_trace, 41, 1500, 300),
        (by_dynamo, 127, 500, 100),
        pytest.param(by_symbolic_trace, 1, 54000, 13000, marks=pytest.mark.long),
        pytest.param(by_dynamo, 7, 9000, 2200, marks=pytest.mark.long),
    ],
)
def test_a_write_anywhere_is_seen_by_what_eager_lets_see_it(capture: Any, stride: int, counted: int, fused: int) -> None:
    verdicts = swept(capture, stride)
    print(verdicts)
    assert verdicts["fused"] + verdicts["declined"] >= counted, verdicts
    assert verdicts["fused"] >= fused, verdicts


def test_rewriting_writes_to_nothing() -> None:
    """Shapes are found on fakes of the state too."""
    case = Case("conv_norm_pool_gelu of modules", "", "{t}.mul_(-0.5)", 2, "self.conv.bias")
    model = case.model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    args = case.arguments()
    fxfuse.rewrite(fx.symbolic_trace(model), *args, select="always")
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert are_same(args, case.arguments())


def test_inputs_of_a_traced_graph_may_share_memory_at_any_call() -> None:
    """Nothing guards a rewritten module: it is made from separate inputs, and called with one and a view of it."""

    def run(x: torch.Tensor, other: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        y = torch.conv2d(x, w)
        other.mul_(-0.5)
        return F.adaptive_avg_pool2d(F.gelu(y), 1)

    gm = fx.symbolic_trace(run)
    rewritten, report = fxfuse.rewrite(gm, torch.zeros(X2), torch.zeros(X2[1:]), torch.zeros(W2), select="always")
    x, w = torch.randn(X2), torch.randn(W2)
    (one, other) = x.clone(), x.clone()
    torch.testing.assert_close(rewritten(one, one[0], w), run(other, other[0], w))
    assert "may write to x between" in report.declined[0].reason


@pytest.mark.parametrize("capture", [by_symbolic_trace, by_dynamo])
@pytest.mark.parametrize("other", ["{t}.data = {u}.clone()", "{t}.set_({u}.clone())"])
@pytest.mark.parametrize("place", [1, 4])
@pytest.mark.parametrize("gelu", ["F.gelu(y)", "aten.gelu_.default(y)"])
def test_a_write_to_what_has_another_storage_elsewhere(capture: Any, other: str, place: int, gelu: str) -> None:
    """The chain reads a view; its base is written to inside the chain, and given another storage before or behind it."""
    inside = Case("conv_gelu_pool", "", "{t}.mul_(-0.5)", 2, "x")
    moves = [other.format(t="x", u="r[:216].view(2, 3, 6, 6)")]
    head, *lines = inside.source().replace("torch.conv2d(x,", "torch.conv2d(view,").replace("F.gelu(y)", gelu).splitlines()
    lines = ["    view = x.view(x.shape)", *lines]
    lines = [*lines[:place], *(f"    {line}" for line in moves), *lines[place:]]
    case = Fixed(inside.chain, "", "", 0, "x", "\n".join([head, *lines, ""]))
    assert verdict(case, capture) in ("declined", "fused", "the tracer loses the write", "the tracer refuses")


@dataclasses.dataclass(frozen=True)
class Fixed(Case):
    """A case whose program is given."""

    program: str = ""

    def source(self) -> str:
        return self.program
