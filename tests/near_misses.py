"""Graphs that are declined where a spelling cannot show it: each piece of a sentence with what triggers it. None needs a GPU or a compiler."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from chains import RELU, SIN, Net, conv_relu, of_steps
from convolutions import TAKEN, W2, W3, X2, X3, graph_of, in_training, normed, pooled
from models import ConvGeluPool, dynamo_graph, fake_mode, fuse, fused_nodes
from spellings import autocast
from torch import fx, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import fxfuse
from fxfuse import backend, engine, fused, weigh
from fxfuse.choose import RATES
from fxfuse.fused import Gpu
from fxfuse.options import Options
from fxfuse.report import Report

B = (16,)
H200_RATES = RATES["NVIDIA H200"]


def seen(gm: fx.GraphModule, select: str = "always") -> Report:
    with torch.no_grad():
        return fuse(gm, select)[1]


def on_cpu(run: Callable[..., Any], *inputs: Any, **how: Any) -> fx.GraphModule:
    """The graph of a call; a tuple of sizes is a tensor of them."""
    with torch.no_grad():
        return dynamo_graph(run, *(torch.zeros(given) if isinstance(given, tuple) else given for given in inputs), **how)


def conv_gelu_pool(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None = None) -> torch.Tensor:
    return pooled(torch.conv2d(x, w, b))


def conv1d_gelu_pool(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.adaptive_avg_pool1d(F.gelu(torch.conv1d(x, w)), 1)


def two_convolutions(x: torch.Tensor, w: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return normed(torch.conv3d(x, w) + torch.conv3d(x, v))


class StrideVaries(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(W2))

    def forward(self, x: torch.Tensor, stride: int) -> torch.Tensor:
        return pooled(torch.conv2d(x, self.weight, stride=stride))


# Chains with keywords, for arguments that eager refuses and a graph from elsewhere may hold.
def mean_by_keywords(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.gelu(torch.conv2d(x, w), approximate="none").mean(dim=(2, 3), keepdim=True)


def pool_by_keywords(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.adaptive_avg_pool2d(F.gelu(torch.conv2d(x, w)), output_size=1)


def norm_by_keywords(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return F.gelu(F.avg_pool3d(F.layer_norm(torch.conv3d(x, w), normalized_shape=(10,), eps=1e-5), kernel_size=2, divisor_override=3))


def with_argument(run: Callable[..., Any], x: tuple[int, ...], w: tuple[int, ...], name: str, value: Any) -> Report:
    """The chain with another value for the argument of that name; a function of a size that varies gives the example value of a node."""
    gm = on_cpu(run, x, w, dynamic=True)
    if callable(value):
        varying = (node for node in gm.graph.find_nodes(op="placeholder") if isinstance(node.meta["example_value"], torch.SymInt))
        given, node = value(next(varying).meta["example_value"]), next(iter(gm.graph.nodes))
        with gm.graph.inserting_before(node):
            value = gm.graph.placeholder("given")
        value.meta["example_value"] = given
    next(node for node in gm.graph.nodes if name in node.kwargs).update_kwarg(name, value)
    return seen(gm)


def varies(size: torch.SymInt) -> torch.SymInt:
    return size


def as_one_value(size: torch.SymInt) -> torch.Size:
    return torch.Size((size, size))


def with_value(run: Callable[..., Any], name: str, value: torch.Tensor, *inputs: Any) -> Report:
    """The chain with another example value for the node of that name."""
    gm = on_cpu(run, *inputs)
    next(node for node in gm.graph.nodes if node.name == name).meta["example_value"] = value
    return seen(gm)


def on_gpu(patch: pytest.MonkeyPatch, name: str, gpu: Gpu | None) -> Report:
    patch.setattr(fused, "gpu_of", lambda device: gpu)
    return seen(graph_of(*TAKEN[name]))


def wide_rows(patch: pytest.MonkeyPatch) -> Report:
    """More shared memory than a block of such a GPU has."""
    patch.setattr(fused, "gpu_of", lambda device: Gpu(8, 108, 101376))
    run, x, w = (lambda x, w: normed(torch.conv3d(x, w, stride=2), 4)), (1, 8, 20, 40, 510), (16, 8, 4, 4, 4)
    return seen(graph_of(run, x, w))


def by_rates(patch: pytest.MonkeyPatch, rates: Any, gm: fx.GraphModule) -> Report:
    patch.setattr(weigh, "rates_of", lambda device: rates)
    return seen(gm, "auto")


def under_autocast() -> Report:
    with autocast():
        return seen(on_cpu(conv_gelu_pool, X2, W2))


def timed() -> Report:
    """Under max-autotune, where Inductor took less time."""
    gm, times = on_cpu(conv_gelu_pool, X2, W2), {"gelu_pool": 0.6, "inductor": 0.5}
    return engine.fuse(gm.graph, Options(), unavailable=lambda device: None, timer=lambda match, implementations: times)[1]


def needing_data() -> Report:
    return fxfuse.explain(lambda x: x * 2 if x.sum() > 0 else x, torch.zeros(3))


def with_dynamo_off(patch: pytest.MonkeyPatch) -> Report:
    patch.setenv("TORCHDYNAMO_DISABLE", "1")
    return fxfuse.explain(torch.relu, torch.zeros(3))


def of_registered(chain: fxfuse.Chain, run: Callable[..., Any], *inputs: Any) -> Report:
    with fxfuse.register(chain):
        return seen(on_cpu(run, *inputs))


def needing_a_gradient(run: Callable[..., Any], *inputs: tuple[int, ...], select: str = "always") -> Report:
    return fuse(dynamo_graph(run, *(torch.zeros(given, requires_grad=True) for given in inputs)), select)[1]


def of_training() -> Report:
    with fxfuse.register(conv_relu()):
        return needing_a_gradient(lambda x, w: torch.conv2d(x, w).relu(), X2, W2)


def written_behind(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    out = conv_gelu_pool(x, w, b)
    with torch.no_grad():
        b.add_(1)
    return out


def of_views(run: Callable[[torch.Tensor], torch.Tensor]) -> Report:
    view = fxfuse.Word("view", fxfuse.Spelling(torch.ops.aten.reshape.default, methods=("view",)))
    return of_registered(of_steps("views", ("view", ("sin", "view")), (view, SIN), names=("view", "then")), run, (4, 4))


def of_a_pair(run: Callable[[torch.Tensor], torch.Tensor]) -> Report:
    """relu -> the largest values, which torch.max returns beside their indices."""
    largest = fxfuse.Word("largest", fxfuse.Spelling(torch.ops.aten.max.dim, torch.max))
    return of_registered(of_steps("relu_largest", ("relu", "largest"), (RELU, largest)), run, (4, 4))


def mistaken() -> Report:
    def takes(**calls: Any) -> Any:
        raise ZeroDivisionError("a defect")

    return of_registered(conv_relu(takes=takes), Net(), (2, 4, 8, 8))


def with_another_forward() -> Report:
    gm = fx.symbolic_trace(ConvGeluPool())
    gm.forward = lambda x: 2 * type(gm).forward(gm, x)
    return fxfuse.rewrite(gm, torch.zeros(2, 4, 8, 8))[1]


def failing_pass(patch: pytest.MonkeyPatch) -> Report:
    def fail(*_: Any, **__: Any) -> None:
        raise ZeroDivisionError("a defect")

    patch.setattr(engine, "fuse", fail)
    return backend.fuse_in_place(on_cpu(conv_gelu_pool, X2, W2), Options())


def failing_inductor(patch: pytest.MonkeyPatch) -> Report:
    def compile_fx(gm: fx.GraphModule, *_: Any, **__: Any) -> Callable[..., Any]:
        if fused_nodes(gm.graph):
            raise RuntimeError("no lowering")
        return gm.forward

    patch.setattr("torch._inductor.compile_fx.compile_fx", compile_fx)
    patch.setattr(engine, "fuse", partial(engine.fuse, unavailable=lambda device: None))
    with torch.no_grad():
        torch.compile(ConvGeluPool(), backend="fxfuse", options={"fxfuse.select": "always"})(torch.zeros(2, 4, 8, 8))
    return fxfuse.reports()[-1]


def in_a_loop(x: torch.Tensor, w: torch.Tensor) -> Any:
    return torch.while_loop(lambda i, y: i < 3, lambda i, y: (i + 1, y + conv_gelu_pool(y, w).mean()), (torch.tensor(0), x))


def no_policy() -> Any:
    return nullcontext(), nullcontext()


def checkpointed(context_fn: Callable[[], Any]) -> Report:
    with fake_mode():
        return seen(on_cpu(lambda x, w: checkpoint(conv_gelu_pool, x, w, use_reentrant=False, context_fn=context_fn), X2, W2))


def marked_behind_the_convolution(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = torch.conv2d(x, w)
    with torch.fx.traceback.annotate({"mark": 1}):
        return pooled(y)


# fmt: off
CASES: dict[str, Callable[[pytest.MonkeyPatch], Report]] = {
    "the result needs a gradient and the op has none": lambda patch: of_training(),
    'backward="save"': lambda patch: fuse(in_training(graph_of(conv_gelu_pool, X2, W2)), backward="save")[1],
    "us in a training step, Inductor at least": lambda patch: needing_a_gradient(conv_gelu_pool, X2, W2, select="auto"),
    "add may write to l_b_ behind the chain": lambda patch: needing_a_gradient(written_behind, X2, W2, B),
    'fxfuse.select is "never"': lambda patch: seen(on_cpu(conv_gelu_pool, X2, W2), "never"),
    "add already belongs to another": lambda patch: seen(on_cpu(two_convolutions, X3, W3, W3)),
    "holds no example value for the result of conv": lambda patch: seen(fx.symbolic_trace(ConvGeluPool())),
    "is a torch.sparse_coo tensor": lambda patch: with_value(conv_gelu_pool, "l_x_", torch.zeros(X2).to_sparse(), X2, W2),
    "l_b_ is on meta, the convolution on cpu": lambda patch: with_value(conv_gelu_pool, "l_b_", torch.zeros(B, device="meta"), X2, W2, B),
    "is torch.bfloat16, torch.float32 at gelu, and torch.bfloat16 at its end": lambda patch: with_value(
        conv_gelu_pool, "gelu", torch.zeros(2, 16, 10, 12), *(torch.zeros(shape, dtype=torch.bfloat16) for shape in (X2, W2))
    ),
    "the 1-d convolution's result has its channels innermost": lambda patch: with_value(
        conv1d_gelu_pool, "conv1d", torch.zeros(2, 6, 8).transpose(1, 2), (2, 4, 8), (8, 4, 3)
    ),
    "gelu's approximate='fast' is neither": lambda patch: with_argument(mean_by_keywords, X2, W2, "approximate", "fast"),
    "the mean's keepdim=2 is not a bool": lambda patch: with_argument(mean_by_keywords, X2, W2, "keepdim", 2),
    "output size [-1, -1] is negative": lambda patch: with_argument(pool_by_keywords, X2, W2, "output_size", -1),
    "the pool's output size [torch.Size(": lambda patch: with_argument(pool_by_keywords, X2, W2, "output_size", as_one_value),
    "layer_norm's normalized_shape is not known size by size": lambda patch: with_argument(
        norm_by_keywords, X3, W3, "normalized_shape", as_one_value
    ),
    "avg_pool3d's window [": lambda patch: with_argument(norm_by_keywords, X3, W3, "kernel_size", varies),
    "avg_pool3d's divisor_override is not constant": lambda patch: with_argument(norm_by_keywords, X3, W3, "divisor_override", varies),
    "layer_norm's eps is not constant": lambda patch: with_argument(norm_by_keywords, X3, W3, "eps", varies),
    "the add's alpha is not a constant number": lambda patch: seen(
        on_cpu(lambda x, w, n: normed(torch.add(torch.conv3d(x, w), torch.ones(()), alpha=n)), X3, W3, 3, dynamic=True)
    ),
    "the addend is a symbolic or complex number": lambda patch: seen(
        on_cpu(lambda x, w, n: normed(torch.conv3d(x, w) + n), X3, W3, 3, dynamic=True)
    ),

    "it is in the body of while_loop": lambda patch: seen(on_cpu(in_a_loop, X2, W2)),
    "saves the result of aten.gelu.default": lambda patch: checkpointed(
        partial(create_selective_checkpoint_contexts, [torch.ops.aten.gelu.default])
    ),
    "the selective checkpoint around it cannot be asked": lambda patch: checkpointed(no_policy),
    "gelu is annotated otherwise (custom={'mark': 1}) than": lambda patch: seen(on_cpu(marked_behind_the_convolution, X2, W2)),

    "the in-place sin writes to l_x_ through a view of it": lambda patch: of_views(lambda x: x.view(-1).sin_()),
    "the chain's result is a view of l_x_": lambda patch: of_views(lambda x: x.view(-1).view((2, -1))),
    "of which the first entry is not read": lambda patch: of_a_pair(lambda x: torch.max(F.relu(x), 1)[1]),
    "a mistake in the chain conv_relu: its takes at ": lambda patch: mistaken(),

    "input, weight and result are torch.float32, torch.float32, torch.bfloat16": lambda patch: under_autocast(),
    "the weight's shape is not constant": lambda patch: seen(graph_of(conv_gelu_pool, X2, W2, dynamic=True)),
    "the convolution's geometry is not constant": lambda patch: seen(on_cpu(StrideVaries(), X2, 2, dynamic=True)),
    "the convolution is on a CPU": lambda patch: seen(on_cpu(conv_gelu_pool, X2, W2)),
    "there is no GPU to run it on": lambda patch: on_gpu(patch, "conv2d", None),
    "compute capability 7.x is older than 8.0": lambda patch: on_gpu(patch, "conv2d", Gpu(7, 80, 98304)),
    "a row of windows needs up to": lambda patch: wide_rows(patch),

    'select="tail"': lambda patch: seen(graph_of(conv_gelu_pool, X2, W2), "tail"),
    "predicted ": lambda patch: by_rates(patch, RATES["cpu"], on_cpu(conv_gelu_pool, X2, W2)),
    "the conv_gelu_pool portable tf32 kernel was not measured": lambda patch: by_rates(
        patch, replace(H200_RATES, kernels={}), graph_of(conv_gelu_pool, X2, W2)
    ),
    "a fused convolution is not taken on a device that was not measured": lambda patch: by_rates(patch, None, graph_of(conv_gelu_pool, X2, W2)),
    "saves 0%, less than the 20% asked for": lambda patch: by_rates(patch, None, on_cpu(conv_gelu_pool, X2, W2)),
    "Inductor is the fastest: ": lambda patch: timed(),

    "the model needs the data of a tensor": lambda patch: needing_data(),
    "turns torch.compile off": lambda patch: with_dynamo_off(patch),
    "Dynamo captured no graph": lambda patch: fxfuse.explain(lambda x: x, torch.zeros(3)),
    "the module's forward is not its graph's": lambda patch: with_another_forward(),
    "an exception inside fxfuse: ZeroDivisionError": failing_pass,
    "Inductor does not compile the graph with conv_gelu_pool fused": failing_inductor,
}
# fmt: on
