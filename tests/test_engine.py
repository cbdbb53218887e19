"""The engine over whole graphs: untouched without a match, linear, no guards, each node in one chain at most, and what options do to it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import (
    ConvGeluPool,
    ConvNormPoolGelu,
    arguments,
    dynamo_graph,
    dynamo_graphs,
    fake_mode,
    fuse,
    fused_nodes,
    gelu_pool,
    norm_pool_gelu,
    reasons,
    traced_graph,
)
from torch import fx
from torch._dynamo.utils import counters, detect_fake_mode

from fxfuse import choose, engine
from fxfuse.choose import Rates
from fxfuse.options import Options
from fxfuse.places import short

X, W, X3, W3 = (2, 4, 8, 8), (8, 4, 3, 3), (2, 4, 6, 6, 12), (8, 4, 3, 3, 3)


def captured(run: Callable[..., Any], *shapes: tuple[int, ...]) -> fx.GraphModule:
    with fake_mode(), torch.no_grad():
        return dynamo_graph(run, *(torch.zeros(shape) for shape in shapes))


def both_chains(x: torch.Tensor, w: torch.Tensor, x3: torch.Tensor, w3: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return gelu_pool(torch.conv2d(x, w)), norm_pool_gelu(torch.conv3d(x3, w3))


class Lines:
    count = 0


@contextmanager
def lines_of_fxfuse() -> Iterator[Lines]:
    """Counts the lines that fxfuse executes: a measure of work that does not depend on the machine."""
    lines, package = Lines(), engine.__name__.split(".")[0]

    def trace(frame: Any, event: str, _: Any) -> Any:
        if frame.f_globals.get("__name__", "").split(".")[0] != package:
            return None
        lines.count += event == "line"
        return trace

    sys.settrace(trace)
    try:
        yield lines
    finally:
        sys.settrace(None)


def work(gm: fx.GraphModule) -> int:
    with lines_of_fxfuse() as lines:
        fuse(gm)
    return lines.count


def pointwise(size: int) -> fx.GraphModule:
    def run(x: torch.Tensor) -> torch.Tensor:
        for index in range(size // 2):
            x = x.add_(1) if index % 3 else (x + x).relu()
            x = x * 1.5
        return x

    gm, value = fx.symbolic_trace(run), fake_mode().from_tensor(torch.zeros(2))
    for node in gm.graph.nodes:
        node.meta["val"] = value
    return gm


def interleaved(chains: int) -> fx.GraphModule:
    """Every convolution before every tail, with as many writes and autocast regions in between."""

    def run(x: torch.Tensor, w: torch.Tensor, a: torch.Tensor) -> list[torch.Tensor]:
        convs = [torch.conv2d(x, w) for _ in range(chains)]
        for _ in range(chains):
            a.add_(1)
        gelus = [F.gelu(y) for y in convs]
        return [F.adaptive_avg_pool2d(y, 1) for y in gelus]

    return traced_graph(run, torch.zeros(1, 2, 3, 3), torch.zeros(2, 2, 1, 1), torch.zeros(3))


def test_a_graph_without_a_match_is_the_same_object() -> None:
    gm = pointwise(5000)
    assert len(gm.graph.nodes) > 5000
    graph, report = fuse(gm)
    assert graph is gm.graph
    assert not report.fused and not report.declined


@pytest.mark.parametrize(("make", "size"), [(pointwise, 2500), (interleaved, 40)])
def test_the_pass_is_linear(make: Callable[[int], fx.GraphModule], size: int) -> None:
    small, large = make(size), make(2 * size)
    fuse(small)  # what is computed once a process
    assert work(large) < 2.2 * work(small)


def test_a_value_with_many_readers_is_linear() -> None:
    def make(readers: int) -> fx.GraphModule:
        def run(x: torch.Tensor, w: torch.Tensor) -> list[torch.Tensor]:
            y = torch.conv2d(x, w)
            return [F.gelu(y) for _ in range(readers)]

        return traced_graph(run, torch.zeros(1, 2, 3, 3), torch.zeros(2, 2, 1, 1))

    small, large = make(200), make(400)
    fuse(small)
    assert work(large) < 2.2 * work(small)


DYNAMIC = {
    "gelu_pool": (lambda x: gelu_pool(torch.conv2d(x, torch.ones(W), torch.ones(8))), X),
    "gelu_pool, channels_last": (lambda x: gelu_pool(torch.conv2d(x.contiguous(memory_format=torch.channels_last), torch.ones(W))), X),
    "mean": (lambda x: F.gelu(torch.conv2d(x, torch.ones(W))).mean((2, 3), keepdim=True), X),
    "output size from a shape": (lambda x: F.adaptive_avg_pool2d(F.gelu(torch.conv2d(x, torch.ones(W))), (x.shape[2] // 2, None)), X),
    "output size of the input": (lambda x: F.adaptive_avg_pool2d(F.gelu(torch.conv2d(x, torch.ones(W))), x.shape[-2:]), X),
    "norm_pool_gelu": (lambda x: norm_pool_gelu(torch.conv3d(x, torch.ones(W3), torch.ones(8)) + 1.0), X3),
    "norm_pool_gelu, ceil_mode": (lambda x: F.gelu(F.avg_pool3d(norm(torch.conv3d(x, torch.ones(W3))), 3, 2, 1, True)), X3),
    "transposed, addend of the width": (lambda x: norm_pool_gelu(transposed(x) + torch.ones(x.shape[-1] * 2)), X3),
    "addend of full size": (lambda x: norm_pool_gelu(torch.conv3d(x, torch.ones(W3), padding=1) - x.repeat(1, 2, 1, 1, 1)), X3),
}


def norm(y: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(y, y.shape[-1:])


def transposed(x: torch.Tensor) -> torch.Tensor:
    return F.conv_transpose3d(x, torch.ones(4, 8, 3, 3, 3), torch.ones(8), 2, 1, 1)


def sizes(shape: tuple[int, ...], varies: str) -> list[tuple[int, ...]]:
    if varies == "batch":
        return [(shape[0] + n, *shape[1:]) for n in range(5)]
    return [(*shape[:2], *(size + n for size in shape[2:])) for n in range(5)]


@pytest.mark.parametrize("varies", ["batch", "space"])
@pytest.mark.parametrize(("run", "shape"), DYNAMIC.values(), ids=DYNAMIC)
def test_one_graph_serves_every_size_and_conditions_install_no_guard(run: Callable[..., Any], shape: tuple[int, ...], varies: str) -> None:
    compiled = {"eager": 0, "fused": 0}

    def eager(gm: fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
        compiled["eager"] += 1
        return gm.forward

    def backend(gm: fx.GraphModule, example_inputs: Any) -> Callable[..., Any]:
        compiled["fused"] += 1
        shape_env = detect_fake_mode(example_inputs).shape_env
        before = known(shape_env)
        graph, report = fuse(gm)
        assert len(report.fused) == 1 and not report.declined
        assert known(shape_env) == before
        assert "->" in report.fused[0].shapes
        (node,) = fused_nodes(graph)
        result = graph.find_nodes(op="output")[0].args[0][0]
        was = gm.graph.find_nodes(op="output")[0].args[0][0]
        assert result.meta["example_value"].shape == was.meta["example_value"].shape
        return gm.forward

    with torch.no_grad():
        for compile_graph in (eager, backend):
            torch._dynamo.reset()
            function = torch.compile(run, backend=compile_graph, dynamic=True)
            for size in sizes(shape, varies):
                function(torch.zeros(size))
    # torch 2.11's avg_pool3d compiles once for even and once for odd sizes, with or without fxfuse.
    assert compiled["fused"] == compiled["eager"] <= (2 if torch.__version__ < "2.12" else 1)


def known(shape_env: Any) -> tuple[Any, ...]:
    # torch 2.11 has two spellings of a remainder, and avg_pool3d's own fake installs the same guard in either.
    guards = {str(guard.expr).replace("PythonMod", "Mod") for guard in shape_env.guards}
    divisible = [] if torch.__version__ < "2.12" else list(shape_env.divisible)
    return guards, dict(shape_env.replacements), divisible, shape_env.num_deferred_runtime_asserts


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_norm_over_the_dimensions_of_a_shape(dynamic: bool) -> None:
    def run(x: torch.Tensor) -> torch.Tensor:
        y = torch.conv3d(x, torch.ones(W3))
        return F.gelu(F.avg_pool3d(F.layer_norm(y, y.shape[-3:]), 2))

    with torch.no_grad():
        graph, _ = fuse(dynamo_graph(run, torch.zeros(X3), dynamic=dynamic))
    (node,) = fused_nodes(graph)
    assert arguments(node)["norm_ndim"] == 3


def test_a_size_that_only_data_decides_is_no_obstacle() -> None:
    def run(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        (chosen,) = mask.nonzero(as_tuple=True)
        torch._check(chosen.shape[0] > 0)
        return gelu_pool(torch.conv2d(x.index_select(0, chosen), torch.ones(W), torch.ones(8)))

    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True), torch.no_grad():
        _, report = fuse(dynamo_graph(run, torch.ones(X), torch.tensor([True, False])))
    assert [fused.shapes for fused in report.fused] == ["[u0, 4, 8, 8] -> [u0, 8, 6, 6] -> [u0, 8, 1, 1]"]


@pytest.mark.parametrize(("model", "shape"), [(ConvGeluPool(output_size=(None, 2)), X), (ConvNormPoolGelu(), X3)])
def test_an_export_graph_of_dynamic_sizes(model: torch.nn.Module, shape: tuple[int, ...]) -> None:
    sizes = {0: torch.export.Dim.AUTO, 2: torch.export.Dim.AUTO}
    program = torch.export.export(model, (torch.zeros(shape),), dynamic_shapes=(sizes,))
    with torch.no_grad():
        graph, report = fuse(program.module())
    assert len(report.fused) == 1
    (node,) = fused_nodes(graph)
    assert isinstance(node.meta["val"].shape[0], torch.SymInt)


SYMBOLIC = {
    "addend": (lambda x, n: norm_pool_gelu(torch.conv3d(x, torch.ones(W3)) + n), "the addend is a symbolic"),
}


@pytest.mark.parametrize(("run", "reason"), SYMBOLIC.values(), ids=SYMBOLIC)
def test_numbers_that_vary_are_declined(run: Callable[..., Any], reason: str) -> None:
    with torch.no_grad():
        gm = dynamo_graph(run, torch.zeros(X3), 2, dynamic=True)
        _, report = fuse(gm)
    assert reason in reasons(report)[0]


def test_a_symbol_that_the_graph_is_specialised_to_is_a_literal() -> None:
    """avg_pool3d takes ints, so tracing it fixes the symbol's value; LayerNorm's eps is a symbol that Dynamo fixes."""
    with torch.no_grad():
        gm = dynamo_graph(lambda x, n: F.gelu(F.avg_pool3d(norm(torch.conv3d(x, torch.ones(W3))), n)), torch.zeros(X3), 2, dynamic=True)
        graph, report = fuse(gm)
    assert len(report.fused) == 1
    assert [2, 2, 2] in fused_nodes(graph)[0].args


def test_both_chains_of_a_graph_are_fused() -> None:
    graph, report = fuse(captured(both_chains, X, W, X3, W3))
    assert sorted(fused.chain for fused in report.fused) == ["conv_gelu_pool", "conv_norm_pool_gelu"]
    assert len(fused_nodes(graph)) == 2


def test_a_node_belongs_to_one_chain_and_the_choice_is_the_same_each_time() -> None:
    def run(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return norm_pool_gelu(torch.conv3d(x, w) + torch.conv3d(x, v))

    texts = set()
    for _ in range(3):
        graph, report = fuse(captured(run, X3, W3, W3))
        assert [fused.nodes[0] for fused in report.fused] == ["conv3d"]
        assert ["already belongs to another fused chain" in reason for reason in reasons(report)] == [True]
        texts.add(str(graph))
    assert len(texts) == 1


def test_passes_turns_chains_off() -> None:
    gm = captured(both_chains, X, W, X3, W3)
    _, report = fuse(gm, passes=("conv_gelu_pool",))
    assert [record.chain for record in (*report.fused, *report.declined)] == ["conv_gelu_pool"]
    graph, report = fuse(gm, passes=())
    assert graph is gm.graph and not report.declined


def test_never() -> None:
    gm = captured(both_chains, X, W, X3, W3)
    graph, report = fuse(gm, select="never")
    assert graph is gm.graph
    assert reasons(report) == ['fxfuse.select is "never"'] * 2


def test_strict_lets_a_chain_pass_that_other_ops_part_behind_the_convolution() -> None:
    gm = captured(lambda x, w: F.gelu(torch.conv2d(x, w).relu()).mean((2, 3)), X, W)
    _, report = fuse(gm, strict=True)
    assert [record.is_parted for record in report.declined] == [True]
    with pytest.raises(engine.NotFusedError, match="gelu is followed by relu"):
        fuse(captured(lambda x, w: F.gelu(torch.conv2d(x, w)).relu().mean((2, 3)), X, W), strict=True)


def test_strict_raises_every_sentence_with_its_place() -> None:
    gm = captured(lambda x, w: (F.gelu(torch.conv2d(x, w)).sum(), F.gelu(torch.conv2d(x, w)).mean(1)), X, W)
    with pytest.raises(engine.NotFusedError) as error:
        fuse(gm, strict=True)
    assert "gelu is followed by sum" in str(error.value) and "not over exactly the spatial dims" in str(error.value)
    assert f"conv_gelu_pool at {short(__file__)}:" in str(error.value)
    graph, report = fuse(captured(both_chains, X, W, X3, W3), strict=True)
    assert len(report.fused) == 2


def test_a_missing_library_is_a_reason() -> None:
    gm = captured(both_chains, X, W, X3, W3)
    graph, report = engine.fuse(gm.graph, Options(select="always"), unavailable=lambda device: f"no library for {device}")
    assert graph is gm.graph and reasons(report) == ["no library for cpu"] * 2


def test_auto_weighs_bytes_on_a_device_that_was_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "RATES", {})
    _, report = fuse(captured(both_chains, X, W, X3, W3), select="auto")
    (fused,), (declined,) = report.fused, report.declined
    assert fused.chain == "conv_norm_pool_gelu" and "not measured on this device" in fused.choice
    assert declined.reason.count("gelu_pool: left to Inductor: not measured") and "saves 0%" in declined.reason


def test_auto_predicts_times_on_a_device_that_was(monkeypatch: pytest.MonkeyPatch) -> None:
    gm = captured(both_chains, X, W, X3, W3)
    monkeypatch.setattr(choose, "RATES", {"cpu": Rates(bandwidth=1e4, inductor_bandwidth=1e4, launch=5.0, call=0.0, kernels={}, ceilings={})})
    _, report = fuse(gm, select="auto")
    assert len(report.fused) == 2 and all(fused.choice.startswith("predicted ") for fused in report.fused)


def test_counters_count_fusions_and_declined_candidates_apart() -> None:
    _, report = fuse(captured(lambda *args: (*both_chains(*args), F.gelu(torch.conv2d(args[0], args[1]))), X, W, X3, W3))
    counters.clear()
    engine.count(report)
    engine.count(report)  # a recompile counts again
    assert dict(counters["fxfuse"]) == {"conv_gelu_pool": 2, "conv_norm_pool_gelu": 2}
    assert dict(counters["fxfuse_declined"]) == {"conv_gelu_pool": 2}


def test_graphs_on_both_sides_of_a_break() -> None:
    def run(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first = gelu_pool(torch.conv2d(x, w))
        torch._dynamo.graph_break()
        return first, gelu_pool(torch.conv2d(x + first.mean(), w))

    with fake_mode(), torch.no_grad():
        graphs = dynamo_graphs(run, torch.zeros(X), torch.zeros(W))
    assert [len(fuse(gm)[1].fused) for gm in graphs] == [1, 1]


def test_nodes_without_values_and_odd_targets_never_raise() -> None:
    class Odd:
        """A callable object as a target."""

        __name__ = "odd"

        def __call__(self, x: torch.Tensor) -> torch.Tensor:
            return x

    gm = traced_graph(ConvGeluPool(), torch.zeros(X))
    conv = next(node for node in gm.graph.nodes if node.op == "call_module")
    with gm.graph.inserting_after(conv):
        gm.graph.call_function(Odd(), (conv,))
        gm.graph.call_function(max, (1, 2))
        gm.graph.call_method("item", (conv,))
    graph, report = fuse(gm)
    assert graph is gm.graph and "is also used by" in reasons(report)[0]
    # Only ops that a chain could hold must have values.
    assert not engine.needs_values(gm.graph) and engine.needs_values(fx.symbolic_trace(ConvGeluPool()).graph)
