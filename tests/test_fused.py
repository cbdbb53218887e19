"""Which convolutions the fused ops take, with the sentence for those they do not; on fake CUDA tensors and a GPU that is only described."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from convolutions import A100, H200, REFUSED, RTX_PRO_6000, TAKEN, X2, graph_of, match_of, normed, pooled
from models import fake_mode, fuse
from torch import fx
from torch._guards import detect_fake_mode

from fxfuse import fused
from fxfuse.chain import first_failure
from fxfuse.choose import RATES, decide
from fxfuse.cost import Training
from fxfuse.fused import Gpu


@pytest.fixture(autouse=True)
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "gpu_of", lambda device: H200 if device.type == "cuda" else None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(("run", "shapes"), [(run, shapes) for run, *shapes in TAKEN.values()], ids=TAKEN)
def test_taken(run: Callable[..., torch.Tensor], shapes: list[tuple[int, ...]], dtype: torch.dtype) -> None:
    gm = graph_of(run, *shapes, dtype=dtype)
    graph, report = fuse(gm)
    assert [record.op for record in report.fused] == [record.chain for record in report.fused] != []
    was, result = (g.find_nodes(op="output")[0].args[0][0].meta["example_value"] for g in (gm.graph, graph))
    assert (result.shape, result.dtype, result.stride()) == (was.shape, was.dtype, was.stride())
    assert not [node for node in graph.nodes if "conv" in str(node.target) and "fxfuse" not in str(node.target)]


@pytest.mark.parametrize(("run", "sentence", "shapes"), [(run, text, shapes) for run, text, *shapes in REFUSED.values()], ids=REFUSED)
def test_refused_and_left_to_the_tail(run: Callable[..., torch.Tensor], sentence: str, shapes: list[tuple[int, ...]]) -> None:
    gm = graph_of(run, *shapes)
    match = match_of(gm)
    best, tail = match.chain.implementations
    assert sentence in first_failure(best.takes(**match.calls))
    _, report = fuse(gm)
    assert [record.op for record in report.fused] == [tail.op]


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


@pytest.mark.parametrize("name", TAKEN)
def test_sizes_that_vary_go_to_the_tail(name: str) -> None:
    """All of them do here, the weight's too."""
    _, report = fuse(graph_of(*TAKEN[name], dynamic=True))
    (record,) = report.fused
    assert f"conv_{record.op}" == record.chain and record.candidates[0].verdict == "the weight's shape is not constant"


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
        for implementation in match.chain.implementations:
            implementation.backward_cost(Training(frozenset({"conv.input", "conv.weight"})), **match.calls)
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
