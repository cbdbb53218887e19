"""Bodies of higher-order ops: which are fused, what is around them, that nothing of the user's changes, and that values are eager's."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from convolutions import H200, W2, X2, graph_of
from models import ConvGeluPool, dynamo_graph, exported_graph, fake_mode, fuse, fused_nodes, gelu_pool, reasons
from torch import fx, nn
from torch._dynamo.utils import counters
from torch._higher_order_ops.hints_wrap import hints_wrapper
from torch._higher_order_ops.map import map as mapped
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.strict_mode import strict_mode
from torch._higher_order_ops.wrap import wrap
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import fxfuse
from fxfuse import engine, fused, precision
from fxfuse.bodies import graphs_below
from fxfuse.torch_private import policies_of, readable

X, W, B = (2, 4, 8, 8), (8, 4, 3, 3), (8,)
aten = torch.ops.aten

checkpointed = functools.partial(checkpoint, use_reentrant=False)


def chain(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return gelu_pool(torch.conv2d(x, w))


def in_checkpoint(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return checkpointed(chain, x, w)


def in_branches(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.sum() > 0, chain, lambda x, w: chain(x, w) * 2, (x, w))


def in_one_branch(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.cond(x.sum() > 0, chain, lambda x, w: x.mean((2, 3), keepdim=True).repeat(1, 2, 1, 1), (x, w))


@torch.compiler.nested_compile_region
def region(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return chain(x, w)


def in_a_region(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return region(x, w) + region(x + 1, w) + region(x * 2, w)


def in_a_region_of_checkpoints(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return checkpointed(lambda x: region(x, w) + region(x + 1, w) + chain(x * 3, w), x)


def in_checkpoint_and_outside(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return chain(x, w) + checkpointed(chain, x, w)


# What is fused, as (body, calls).
FUSED = {
    "checkpoint": (in_checkpoint, [("wrap_body_0", 1)]),
    "checkpoint and outside": (in_checkpoint_and_outside, [("", 1), ("wrap_body_0", 1)]),
    "cond": (in_branches, [("cond_true_0", 1), ("cond_false_0", 1)]),
    "cond, one branch": (in_one_branch, [("cond_true_0", 1)]),
    "nested_compile_region": (in_a_region, [("subgraph_0", 3)]),
    "region in a checkpoint": (in_a_region_of_checkpoints, [("wrap_body_0", 1), ("wrap_body_0.subgraph_0", 2)]),
}


def captured(run: Callable[..., Any], *shapes: tuple[int, ...], trained: bool = False) -> fx.GraphModule:
    with fake_mode(), torch.set_grad_enabled(trained):
        return dynamo_graph(run, *(torch.zeros(shape, requires_grad=trained) for shape in shapes or (X, W)))


def modules(gm: fx.GraphModule) -> dict[str, Any]:
    return dict(gm.named_modules(remove_duplicate=False))


def places(report: fxfuse.Report) -> list[tuple[str, int]]:
    return [(fused.body, fused.calls) for fused in report.fused]


@pytest.mark.parametrize("trained", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize(("run", "expected"), FUSED.values(), ids=FUSED)
def test_chains_in_bodies_are_fused(run: Callable[..., Any], expected: list[tuple[str, int]], trained: bool) -> None:
    gm = captured(run, trained=trained)
    before, held = readable(gm.graph), modules(gm)
    graph, report = fuse(gm, strict=True)
    assert places(report) == expected and not report.declined
    ops = [node.target.name() for below in graphs_below(graph).values() for node in fused_nodes(below)]
    assert ops == ["fxfuse::gelu_pool_training" if trained else "fxfuse::gelu_pool"] * len(expected)
    for below in graphs_below(graph).values():
        below.lint()
    # Graph and bodies stay as they were, and whose they were.
    assert readable(gm.graph) == before and modules(gm) == held
    counters.clear()
    engine.count(report)  # once, however many calls
    assert dict(counters["fxfuse"]) == {"conv_gelu_pool": len(expected)}


def test_strict_stops_at_a_body_before_anything_is_rewritten() -> None:
    gm = captured(lambda x, w: chain(x, w) + checkpointed(lambda x: F.gelu(torch.conv2d(x, w)).amax((2, 3), True), x))
    with pytest.raises(engine.NotFusedError, match="gelu is followed by amax") as error:
        fuse(gm, strict=True)
    assert [(record.body, record.reached) for record in error.value.report.declined] == [("wrap_body_0", "gelu")]


def test_a_replacement_that_is_no_good_leaves_its_own_body_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    (own,) = (one for one in engine.chains() if one.name == "conv_gelu_pool")
    tail = own.implementations[-1]

    def replace(emit: Any, **calls: Any) -> Any:
        return tail.replace(emit, **calls) if tuple(calls["conv"].stride) == (1, 1) else None

    broken = dataclasses.replace(own, implementations=(dataclasses.replace(tail, replace=replace),))
    monkeypatch.setattr(engine, "chains", lambda: (broken,))
    gm = captured(lambda x, w: checkpointed(chain, x, w) + checkpointed(lambda x: gelu_pool(torch.conv2d(x, w, stride=2)), x))
    _, report = fuse(gm)
    assert places(report) == [("wrap_body_0", 1)]
    assert [record.body for record in report.declined] == ["wrap_body_1"] and "returns None" in reasons(report)[0]


class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, w)
        return chain(x, w)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, w = ctx.saved_tensors
        return torch.ones_like(x), torch.ones_like(w)


def in_a_loop(x: torch.Tensor, w: torch.Tensor) -> Any:
    return torch.while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, y + chain(y, w).mean()), (torch.tensor(0), x))


OTHER_OPS = {
    "while_loop": in_a_loop,
    "map_impl": lambda x, w: mapped(lambda e: chain(e[None], w)[0], x),
    "scan": lambda x, w: scan(lambda carry, e: (carry + 1, chain(e[None], w)[0]), torch.zeros(()), x),
    "hints_wrapper": lambda x, w: hints_wrapper(chain, (x, w), {}, hints={"key": 1}),
    "strict_mode": lambda x, w: strict_mode(chain, (x, w)),
    "wrap": lambda x, w: wrap(chain, x, w),
    "wrap, around a checkpoint": lambda x, w: wrap(in_checkpoint, x, w),
}


@pytest.mark.parametrize(("op", "run"), OTHER_OPS.items(), ids=OTHER_OPS)
def test_other_ops_are_declined_by_name(op: str, run: Callable[..., Any]) -> None:
    with torch.no_grad():
        gm = dynamo_graph(run, torch.zeros(X), torch.zeros(W))
    graph, report = fuse(gm)
    assert graph is gm.graph and not report.fused
    (declined,) = report.declined
    assert declined.reason == f"it is in the body of {op.split(',')[0]}, which fxfuse leaves as it is; call the chain outside of it"
    assert declined.body in modules(gm) and set(declined.nodes) <= {node.name for node in gm.get_submodule(declined.body).graph.nodes}


def test_a_custom_autograd_function_is_declined_by_name() -> None:
    _, report = fuse(captured(Twice.apply, trained=True))
    assert not report.fused and "in the body of autograd_function_apply" in reasons(report)[0]


def test_a_body_that_another_op_is_given_too_is_left_alone() -> None:
    gm = captured(in_checkpoint)
    (call,) = (node for node in gm.graph.nodes if str(node.target) == "tag_activation_checkpoint")
    with gm.graph.inserting_after(call):
        gm.graph.call_function(wrap, call.args)
    _, report = fuse(gm)
    assert not report.fused and "in the body of wrap" in reasons(report)[0]


def test_a_known_op_that_gives_another_number_of_operands_is_left_alone() -> None:
    gm = captured(in_checkpoint)
    (call,) = (node for node in gm.graph.nodes if str(node.target) == "tag_activation_checkpoint")
    call.args = call.args[:-1]
    _, report = fuse(gm)
    assert not report.fused and "in the body of tag_activation_checkpoint" in reasons(report)[0]


def save(*ops: Any) -> Callable[..., CheckpointPolicy]:
    return lambda context, op, *args, **kwargs: CheckpointPolicy.PREFER_SAVE if op in ops else CheckpointPolicy.MUST_RECOMPUTE


def every_second_convolution() -> Any:
    seen = []

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
        seen.append(op)
        return op is aten.convolution.default and seen.count(op) % 2 == 0

    return create_selective_checkpoint_contexts(policy)


def no_policy() -> Any:
    return nullcontext(), nullcontext()


# context_fn, and the pieces of what is declined of two chains in one body.
POLICIES = {
    "recompute all": (functools.partial(create_selective_checkpoint_contexts, save()), []),
    "a list of others": (functools.partial(create_selective_checkpoint_contexts, [aten.mm.default]), []),
    "save another": (functools.partial(create_selective_checkpoint_contexts, save(aten.add.Tensor)), []),
    "a list of the convolution": (
        functools.partial(create_selective_checkpoint_contexts, [aten.convolution.default]), ["saves the result of aten.convolution.default"] * 2
    ),
    "save gelu": (functools.partial(create_selective_checkpoint_contexts, save(aten.gelu.default)), ["saves the result of aten.gelu.default"] * 2),
    "every second convolution": (every_second_convolution, ["saves the result of aten.convolution.default"]),
    "no policy": (no_policy, ["cannot be asked (AttributeError: "] * 2),
}  # fmt: skip


@pytest.mark.parametrize(("context_fn", "pieces"), POLICIES.values(), ids=POLICIES)
def test_a_selective_checkpoint_is_asked_what_it_saves(context_fn: Any, pieces: list[str]) -> None:
    gm = captured(lambda x, w: checkpointed(lambda x: chain(x, w) + chain(x + 1, w), x, context_fn=context_fn))
    graph, report = fuse(gm)
    assert len(report.fused) == 2 - len(pieces) and len(report.declined) == len(pieces)
    assert all(piece in reason for piece, reason in zip(pieces, reasons(report)))
    # What was asked for stays asked for, of the rewritten body too.
    (kept,) = (below.owning_module for name, below in graphs_below(graph).items() if name)
    assert policies_of(kept) == policies_of(gm.wrap_body_0) != [] and (kept is gm.wrap_body_0) == (not report.fused)


def test_a_policy_around_a_region_counts_for_it() -> None:
    policy = functools.partial(create_selective_checkpoint_contexts, [aten.gelu.default])
    _, report = fuse(captured(lambda x, w: checkpointed(lambda x: region(x, w), x, context_fn=policy)))
    assert not report.fused and "saves the result of aten.gelu.default" in reasons(report)[0]


def written_behind(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    y = checkpointed(lambda x: gelu_pool(torch.conv2d(x, w, b)), x)
    with torch.no_grad():
        b.add_(1)
    return y


def written_behind_through_a_view(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    y = checkpointed(lambda x: checkpointed(lambda x: gelu_pool(torch.conv2d(x, w, b[:])), x), x)
    with torch.no_grad():
        b.view(2, 4).add_(1)
    return y


def written_before(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        b.add_(1)
    return checkpointed(lambda x: gelu_pool(torch.conv2d(x, w, b)), x)


@pytest.mark.parametrize("trained", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("run", [written_behind, written_behind_through_a_view, written_before])
def test_a_write_behind_the_call_to_what_the_backward_reads_again(run: Callable[..., Any], trained: bool) -> None:
    with fake_mode(), torch.set_grad_enabled(trained):
        gm = dynamo_graph(run, torch.zeros(X), torch.zeros(W, requires_grad=trained), torch.zeros(B))
    _, report = fuse(gm)
    if trained and run is not written_before:
        assert not report.fused and "may write to l_b_ behind the chain" in reasons(report)[0]
    else:
        assert len(report.fused) == 1


def writes_between(x: torch.Tensor, other: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = torch.conv2d(x, w)
    other.add_(1)
    return gelu_pool(y)


region_that_writes = torch.compiler.nested_compile_region(writes_between)

# Whether two operands of the call are one tensor, which the body does not show.
ALIASES = {
    "checkpoint, a view": (lambda x, w: checkpointed(writes_between, x, x.view(-1), w), True),
    "checkpoint, another": (lambda x, w: checkpointed(writes_between, x, x + 1, w), False),
    "region, two others": (lambda x, w: region_that_writes(x, x + 1, w) + region_that_writes(x * 2, x + 2, w), False),
}


def second_call_gives_a_view(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    z = x + 1
    return region_that_writes(x, z * 1, w) + region_that_writes(z, z.view(X), w)


@pytest.mark.parametrize(("run", "same"), [*ALIASES.values(), (second_call_gives_a_view, True)], ids=[*ALIASES, "region, a view at the second call"])
def test_operands_that_are_one_tensor(run: Callable[..., Any], same: bool) -> None:
    try:
        gm = captured(run)
    except torch._dynamo.exc.UncapturedHigherOrderOpError as error:
        pytest.skip(f"this torch captures no such call: {str(error).splitlines()[2]}")
    _, report = fuse(gm)
    assert ["may write to l_x_ between" in reason for reason in reasons(report)] == [True] * same
    assert len(report.fused) == (not same)


def test_a_transform_around_the_call() -> None:
    gm = captured(in_checkpoint)
    (call,) = (node for node in gm.graph.nodes if str(node.target) == "tag_activation_checkpoint")
    with gm.graph.inserting_before(call):
        gm.graph.call_function(torch._functorch.predispatch._vmap_increment_nesting, (2, "error"))
    _, report = fuse(gm)
    assert not report.fused and "inside a torch.func transform" in reasons(report)[0]


class Regions(nn.Module):
    """A chain without gradients, one with gradients, and one under autocast: [2, 4, 8, 8] -> three of [2, 8, 1, 1]."""

    def __init__(self) -> None:
        super().__init__()
        self.still, self.trained, self.short = ConvGeluPool(), ConvGeluPool(), ConvGeluPool()

    def forward(self, x: torch.Tensor) -> Any:
        with torch.set_grad_enabled(not torch.is_grad_enabled()):
            still = self.still(x)
        with torch.autocast("cpu", torch.bfloat16):
            short = self.short(x)
        return still * 2, self.trained(x), short


@pytest.mark.parametrize("grad", [True, False])
def test_an_exported_body_runs_in_its_own_grad_mode_and_autocast(grad: bool) -> None:
    model, x = Regions(), torch.randn(X)
    with torch.set_grad_enabled(grad):
        gm = exported_graph(model, x)
        held = modules(gm)
        rewritten, report = fxfuse.rewrite(gm, select="always")
        found, expected = rewritten(x), model(x)
    assert len(report.fused) == 3 and sorted(bool(record.body) for record in report.fused) == [False, True, True]
    assert modules(gm) == held
    ops = [node.target.name() for below in graphs_below(rewritten.graph).values() for node in fused_nodes(below)]
    assert sorted(op.endswith("_training") for op in ops) == ([False, True, True] if grad else [False, False, True])
    for one, other in zip(found, expected):
        assert (one.dtype, one.requires_grad) == (other.dtype, other.requires_grad)
        tolerance = 2e-2 if one.dtype is torch.bfloat16 else 1e-5
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def test_a_variant_for_each_precision_has_regions_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "gpu_of", lambda device: H200)
    gm = graph_of(in_a_region_of_checkpoints, X2, W2)
    graph, report = fuse(gm)
    assert len(report.fused) == 2
    compiled: list[tuple[list[Any], set[str]]] = []

    def compile_graph(inputs: Any) -> Callable[..., Any]:
        below = [node for one in graphs_below(graph).values() for node in one.nodes]
        given = [node.args[index] for node, index in precision.calls(graph)]
        compiled.append((given, {node.args[1] for node in below if str(node.target) == "invoke_subgraph"}))
        return lambda *args: None

    following = precision.compiled(graph.owning_module, (), compile_graph)
    for switch in ("ieee", "tf32", "ieee"):
        monkeypatch.setattr(precision, "current", lambda switch=switch: switch)
        following()
    assert sorted(given for given, _ in compiled) == [["ieee"] * 2, ["tf32"] * 2]
    assert len(compiled) == 2 and compiled[0][1].isdisjoint(compiled[1][1])


@pytest.mark.compiler
def test_inductor_that_fails_on_the_fused_bodies_gets_the_ones_they_were(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """AOTAutograd keeps what it traced of a region for the compilation: the second attempt must not get the first one's."""
    import torch._inductor.compile_fx as inductor

    compile_fx, attempts = inductor.compile_fx, []

    def fails_first(gm: fx.GraphModule, *args: Any, **kwargs: Any) -> Any:
        attempts.append(sum(len(fused_nodes(below)) for below in graphs_below(gm.graph).values()))
        done = compile_fx(gm, *args, **kwargs)
        if len(attempts) == 1:
            raise RuntimeError("no lowering")
        return done

    torch._dynamo.reset()
    monkeypatch.setattr(inductor, "compile_fx", fails_first)
    x, w = torch.randn(X), torch.randn(W, requires_grad=True)
    expected = torch.autograd.grad(in_a_region(x, w).sum(), w)
    run = torch.compile(in_a_region, backend="fxfuse", options={"fxfuse.select": "always"})
    with torch.compiler.config.patch(force_disable_caches=True):  # what comes from a cache is not traced
        gradients = torch.autograd.grad(run(x, w).sum(), w)
    torch.testing.assert_close(gradients, expected, rtol=1e-4, atol=1e-4)
    assert attempts == [1, 0] and "Inductor does not compile" in fxfuse.reports()[-1].stopped
    with torch.profiler.profile() as profile:
        run(x, w)
    ran = {event.key for event in profile.key_averages()}
    assert len(ran) > 1 and not [op for op in ran if op.startswith("fxfuse::")]
