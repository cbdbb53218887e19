"""Which convolutions the fused ops take, with the sentence for those they do not; on fake CUDA tensors and a GPU that is only described."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from models import dynamo_graph, fake_mode, fuse
from torch import fx
from torch._guards import detect_fake_mode

from fxfuse import fused
from fxfuse.chain import chains, first_failure
from fxfuse.choose import RATES, decide
from fxfuse.fused import Gpu
from fxfuse.match import Match, find
from fxfuse.view import GraphView

H200 = Gpu(major=9, num_processors=132, shared_bytes=232448)
X2, W2, X3, W3 = (2, 8, 12, 14), (16, 8, 3, 3), (2, 8, 6, 6, 12), (16, 8, 3, 3, 3)


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "gpu_of", lambda device: H200 if device.type == "cuda" else None)


def pooled(y: torch.Tensor) -> torch.Tensor:
    return F.adaptive_avg_pool2d(F.gelu(y), 1)


def normed(y: torch.Tensor, pool: int = 2, **window: Any) -> torch.Tensor:
    return F.gelu(F.avg_pool3d(F.layer_norm(y, y.shape[-1:]), pool, **window))


def graph_of(run: Callable[..., torch.Tensor], *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32, dynamic: bool = False) -> fx.GraphModule:
    with fake_mode(), torch.no_grad():
        return dynamo_graph(run, *(torch.empty(shape, device="cuda", dtype=dtype) for shape in shapes), dynamic=dynamic)


def match_of(gm: fx.GraphModule) -> Match:
    view = GraphView(gm.graph)
    (found,) = [found for chain in chains() for found in find(view, chain)]
    assert isinstance(found, Match)
    return found


TAKEN = {
    "conv2d": (lambda x, w: pooled(torch.conv2d(x, w)), X2, W2),
    "conv2d, stride, padding, dilation": (lambda x, w: pooled(torch.conv2d(x, w, None, 2, (1, 2), 2)), X2, W2),
    "conv2d, same": (lambda x, w: pooled(torch.conv2d(x, w, padding="same")), X2, W2),
    "conv1d": (lambda x, w: F.adaptive_avg_pool1d(F.gelu(torch.conv1d(x, w)), 1), (2, 8, 20), (16, 8, 5)),
    "conv3d, mean": (lambda x, w: F.gelu(torch.conv3d(x, w)).mean((2, 3, 4)), X3, W3),
    "conv2d, mean, kept dims": (lambda x, w: F.gelu(torch.conv2d(x, w)).mean((2, 3), True), X2, W2),
    "conv2d, unbatched": (lambda x, w: pooled(torch.conv2d(x, w)), X2[1:], W2),
    "conv3d and norm": (lambda x, w: normed(torch.conv3d(x, w, padding=1)), X3, W3),
    "conv_transpose3d and norm": (lambda x, w: normed(torch.conv_transpose3d(x, w, None, 2, 1, 1), 3), X3, (8, 16, 3, 3, 3)),
    "number as addend": (lambda x, w: normed(torch.conv3d(x, w) - 2), X3, W3),
    "0-dim addend": (lambda x, w, a: normed(torch.conv3d(x, w) + a), X3, W3, ()),
    "one-element addend": (lambda x, w, a: normed(torch.conv3d(x, w) + a), X3, W3, (1,)),
    "per-channel addend": (lambda x, w, a: normed(torch.conv3d(x, w) + a), X3, W3, (1, 16, 1, 1, 1)),
    "per-channel addend, no batch dim": (lambda x, w, a: normed(torch.conv3d(x, w) + a), X3, W3, (16, 1, 1, 1)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("run", "shapes"), [(run, shapes) for run, *shapes in TAKEN.values()], ids=TAKEN)
def test_taken(run: Callable[..., torch.Tensor], shapes: list[tuple[int, ...]], dtype: torch.dtype) -> None:
    gm = graph_of(run, *shapes, dtype=dtype)
    graph, report = fuse(gm)
    assert [record.op for record in report.fused] == [record.chain for record in report.fused] != []
    was, result = (g.find_nodes(op="output")[0].args[0][0].meta["example_value"] for g in (gm.graph, graph))
    assert (result.shape, result.dtype, result.stride()) == (was.shape, was.dtype, was.stride())
    assert not [node for node in graph.nodes if "conv" in str(node.target) and "fxfuse" not in str(node.target)]


REFUSED = {
    "groups": (lambda x, w: pooled(torch.conv2d(x, w, groups=2)), "has 2 groups", X2, (16, 4, 3, 3)),
    "same, even kernel": (lambda x, w: pooled(torch.conv2d(x, w, padding="same")), "not the same on both sides", X2, (16, 8, 4, 4)),
    "transposed": (lambda x, w: pooled(torch.conv_transpose2d(x, w)), "is transposed", X2, (8, 16, 3, 3)),
    "pool not global": (lambda x, w: F.adaptive_avg_pool2d(F.gelu(torch.conv2d(x, w)), 2), "is not global", X2, W2),
    "many weights": (lambda x, w: pooled(torch.conv2d(x, w)), "padded values, over", (2, 512, 8, 8), (512, 512, 3, 3)),
    "large image": (lambda x, w: pooled(torch.conv2d(x, w)), "2^31 or more", (1, 8, 1 << 14, 1 << 14), W2),
    "large kernel": (lambda x, w: normed(torch.conv3d(x, w, padding=3)), "has a size over 5", X3, (16, 8, 7, 7, 7)),
    "stride 3": (lambda x, w: normed(torch.conv3d(x, w, stride=(1, 1, 3), padding=1)), "is not made of 1 and 2", X3, W3),
    "dilation": (lambda x, w: normed(torch.conv3d(x, w, dilation=2, padding=2)), "is not 1", X3, W3),
    "norm over two dims": (
        lambda x, w: F.gelu(F.avg_pool3d(F.layer_norm(torch.conv3d(x, w), (4, 10)), 2)), "over 2 dimensions", X3, W3
    ),
    "wide rows": (lambda x, w: normed(torch.conv3d(x, w, padding=1)), "300 wide", (*X3[:4], 300), W3),
    "overlapping windows": (lambda x, w: normed(torch.conv3d(x, w), 3, stride=2), "overlap", X3, W3),
    "large windows": (lambda x, w: normed(torch.conv3d(x, w, padding=1), 5), "size over 4", X3, W3),
    "padded windows": (lambda x, w: normed(torch.conv3d(x, w), 2, padding=1), "pads", X3, W3),
    "ceil_mode": (lambda x, w: normed(torch.conv3d(x, w), 3, ceil_mode=True), "ceil_mode", X3, W3),
    "divisor": (lambda x, w: normed(torch.conv3d(x, w), 2, divisor_override=3), "divisor_override", X3, W3),
    "addend along a row": (lambda x, w, a: normed(torch.conv3d(x, w) + a), "not one value or one a channel", X3, W3, (10,)),
    "addend a sample": (lambda x, w, a: normed(torch.conv3d(x, w) + a), "not one value or one a channel", X3, W3, (2, 1, 1, 1, 1)),
}  # fmt: skip


@pytest.mark.parametrize(("run", "sentence", "shapes"), [(run, text, shapes) for run, text, *shapes in REFUSED.values()], ids=REFUSED)
def test_refused_and_left_to_the_tail(run: Callable[..., torch.Tensor], sentence: str, shapes: list[tuple[int, ...]]) -> None:
    gm = graph_of(run, *shapes)
    match = match_of(gm)
    best, tail = match.chain.implementations
    assert sentence in first_failure(best.takes(**match.calls))
    _, report = fuse(gm)
    assert [record.op for record in report.fused] == [tail.op]


A100, RTX_PRO_6000 = Gpu(8, 108, 166912), Gpu(12, 188, 101376)


@pytest.mark.parametrize("gpu", [A100, RTX_PRO_6000], ids=["sm_80", "sm_120"])
@pytest.mark.parametrize("name", TAKEN)
def test_devices_with_less_shared_memory_take_the_portable_kernel(name: str, gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "gpu_of", lambda device: gpu)
    match = match_of(graph_of(*TAKEN[name]))
    best = match.chain.implementations[0]
    assert first_failure(best.takes(**match.calls)) is None
    assert " portable " in best.cost(**match.calls).op.kernel


def test_rows_that_do_not_fit_a_device_go_to_the_tail(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.gelu(F.avg_pool3d(F.layer_norm(torch.conv3d(x, w, stride=2), (254,)), 4))

    for gpu, fits in ((H200, True), (A100, False), (RTX_PRO_6000, False)):
        monkeypatch.setattr(fused, "gpu_of", lambda device, gpu=gpu: gpu)
        match = match_of(graph_of(run, (1, 8, 20, 40, 510), (16, 8, 4, 4, 4)))
        refused = first_failure(match.chain.implementations[0].takes(**match.calls))
        assert refused is None if fits else "bytes of shared memory, and a block has" in refused


@pytest.mark.parametrize("gpu", [None, Gpu(7, 80, 98304)])
def test_devices_that_are_left_to_the_tail(gpu: Gpu | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "gpu_of", lambda device: gpu)
    _, report = fuse(graph_of(*TAKEN["conv2d"]))
    assert [record.op for record in report.fused] == ["gelu_pool"]


@pytest.mark.parametrize("name", ["conv2d", "conv3d and norm"])
def test_conditions_and_costs_install_no_guard(name: str) -> None:
    guards = []

    def backend(gm: fx.GraphModule, inputs: Any) -> Callable[..., Any]:
        shape_env = detect_fake_mode(inputs).shape_env
        before = len(shape_env.guards)
        match = match_of(gm)
        best = match.chain.implementations[0]
        assert first_failure(best.takes(**match.calls)) is None
        best.cost(**match.calls)
        guards.append(len(shape_env.guards) - before)
        return gm.forward

    run, x, w = TAKEN[name]
    torch._dynamo.reset()
    with fake_mode(), torch.no_grad():
        x, w = (torch.empty(shape, device="cuda") for shape in (x, w))
        torch._dynamo.mark_dynamic(x, 0)
        torch.compile(run, backend=backend)(x, w)
    assert guards == [0]


HEADLINES = {
    "A": ("conv_norm_pool_gelu", lambda x, w: normed(torch.conv_transpose3d(x, w, None, 2, 1, 1)), (32, 32, 16, 32, 32), (32, 64, 3, 3, 3)),
    "B": ("conv_gelu_pool", lambda x, w: pooled(torch.conv2d(x, w)), (128, 8, 256, 256), (64, 8, 3, 3)),
}


@pytest.mark.parametrize(("chain", "run", "x", "w"), HEADLINES.values(), ids=HEADLINES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_auto_takes_the_headline_models(chain: str, run: Callable[..., Any], x: tuple[int, ...], w: tuple[int, ...], dtype: torch.dtype) -> None:
    match = match_of(graph_of(run, x, w, dtype=dtype))
    best = match.chain.implementations[0]
    cost = best.cost(**match.calls)
    assert cost.op.kernel.startswith(f"{chain} hopper ")
    assert decide(cost, RATES["NVIDIA H200"], "auto").taken


@pytest.mark.parametrize(
    ("run", "x", "w"),
    [
        (lambda x, w: pooled(torch.conv2d(x, w, stride=2)), X2, (64, 8, 3, 3)),
        (lambda x, w: pooled(torch.conv2d(x, w)), X2, (32, 8, 3, 3)),
        (lambda x, w: pooled(torch.conv2d(x, w)), (2, 64, 12, 14), (64, 64, 3, 3)),
        (lambda x, w: normed(torch.conv_transpose3d(x, w, None, 2, 1, 1)), (2, 8, 6, 6, 30), (8, 64, 3, 3, 3)),
    ],
    ids=["stride", "few channels out", "many steps", "width"],
)
def test_small_work_for_the_portable_kernel_is_not_taken_by_auto(run: Callable[..., Any], x: tuple[int, ...], w: tuple[int, ...]) -> None:
    match = match_of(graph_of(run, x, w))
    cost = match.chain.implementations[0].cost(**match.calls)
    assert " portable " in cost.op.kernel
    assert not decide(cost, RATES["NVIDIA H200"], "auto").taken
