"""What Dynamo captures of random programs around both chains, rewritten and run, must do exactly what eager does."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from random_programs import Program, programs
from torch import fx

from fxfuse import engine
from fxfuse.options import Options
from fxfuse.report import reports

pytestmark = pytest.mark.compiler

DRAWS = 300
COMPILED_DRAWS = 5
# Beside twice eager's error: what rounding may do to values of order one, in eager as well as here. A layer_norm over four nearly equal values
# multiplies the last bit of the convolution's result a hundredfold, and a tensor of a few elements does not average that out.
NOISE = {torch.float32: 2e-5, torch.float64: 1e-12, torch.bfloat16: 4e-2, torch.float16: 5e-3}

SETTINGS = settings(derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))


class Checked(fx.Interpreter):
    """Runs a rewritten graph and holds the example value of every fused op against what the op returns."""

    def run_node(self, node: fx.Node) -> Any:
        result = super().run_node(node)
        if is_fused(node):
            fake = node.meta["example_value"]
            assert (fake.dtype, fake.shape, fake.stride()) == (result.dtype, result.shape, result.stride()), node.format_node()
        return result


def is_fused(node: fx.Node) -> bool:
    return getattr(node.target, "namespace", None) == "fxfuse"


def rewriting_backend(counts: Counter) -> Callable[..., Any]:
    """A backend that rewrites, checks what holds for any rewrite, and runs the graph eagerly."""

    def backend(gm: fx.GraphModule, _: Any) -> Callable[..., Any]:
        before = str(gm.graph)
        graph, report = engine.fuse(gm.graph, Options(select="always"))
        assert str(gm.graph) == before, "the original graph was changed"
        assert (graph is gm.graph) == (not report.fused), "a graph with nothing to fuse is not the same object"
        assert sum(map(is_fused, graph.nodes)) == len(report.fused)
        assert all(declined.reason and declined.location for declined in report.declined)
        graph.lint()
        counts.update(fused.chain for fused in report.fused)
        counts["declined"] += len(report.declined)
        return Checked(fx.GraphModule(gm, graph)).run

    return backend


def check(program: Program, backend: Any, **compile_options: Any) -> None:
    """The compiled program against eager: its results, and its arguments afterwards."""
    wide = program.arguments(widen=True)
    reference = (*program.function()(*wide), *wide)
    eager_args = program.arguments()
    eager = (*program.function()(*eager_args), *eager_args)
    args = program.arguments()
    results = (*torch.compile(program.function(), backend=backend, dynamic=False, **compile_options)(*args), *args)
    names = (*(f"returned {name}" for name in program.returned), *(f"argument {given.name}" for given in program.inputs))
    for name, *values in zip(names, results, eager, reference, strict=True):
        assert_same(f"{name} of\n{program.source}", *values)


def assert_same(what: str, result: torch.Tensor, eager: torch.Tensor, reference: torch.Tensor) -> None:
    assert (result.dtype, result.shape, result.stride()) == (eager.dtype, eager.shape, eager.stride()), what
    dtype = eager.dtype
    if not dtype.is_floating_point:
        assert torch.equal(result, eager), what
        return
    result, eager, reference = (torch.nan_to_num(value.double(), posinf=1e30, neginf=-1e30, nan=1e20) for value in (result, eager, reference))
    noise = NOISE[dtype] * (reference.norm() + reference.numel() ** 0.5)
    allowed = 2 * (eager - reference).norm() + noise
    error = (result - reference).norm()
    assert error <= allowed, f"{what}\nerror {error:.2e} against fp64, allowed {allowed:.2e}, eager's {(eager - reference).norm():.2e}"


def test_rewritten_graphs_do_what_eager_does():
    counts: Counter = Counter()

    @settings(SETTINGS, max_examples=DRAWS)
    @given(programs())
    def run(program: Program) -> None:
        torch._dynamo.reset()
        with torch.no_grad():
            check(program, rewriting_backend(counts))
        counts["draws"] += 1

    run()
    assert counts["draws"] >= DRAWS
    # Not a test of anything if hardly a program holds a chain that is fused, or one that is not.
    assert min(counts["conv_norm_pool_gelu"], counts["conv_gelu_pool"], counts["declined"]) >= 40, counts


def test_compiled_programs_do_what_eager_does():
    @settings(SETTINGS, max_examples=COMPILED_DRAWS)
    @given(programs())
    def run(program: Program) -> None:
        torch._dynamo.reset()
        counts: Counter = Counter()
        with torch.no_grad():
            check(program, rewriting_backend(counts))
            assume(counts["conv_norm_pool_gelu"] + counts["conv_gelu_pool"] > 0)
            check(program, "fxfuse", options={"fxfuse.select": "always"})
        assert len(reports()[-1].fused) > 0

    run()
