"""What backwards cost: Inductor's beside what was measured of it, and those of the ops."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from convolutions import H200, training_step

from fxfuse import fused, gradients
from fxfuse.choose import RATES, decide
from fxfuse.cost import BackwardCost, Convolution, Cost, Training, Work
from fxfuse.headline import HEADLINES, Headline
from fxfuse.match import Match
from fxfuse.predict import Rate, Rates, microseconds
from fxfuse.training_cost import torchs_own

NORM, GELU = HEADLINES
# Microseconds of Inductor's kernels around the convolutions in a step of the headline models on an H200.
MEASURED = {(NORM, torch.float32): 3160, (NORM, torch.bfloat16): 2100, (GELU, torch.float32): 3350, (GELU, torch.bfloat16): 2650}
# Easy to add up: a byte takes a microsecond, an operation and a GELU too.
PLAIN = Rates(bandwidth=1.0, inductor_bandwidth=1.0, launch=0.0, call=0.0, kernels={"own": Rate(1.0)}, ceilings={"tf32": 1.0}, gelus=1.0)


@pytest.fixture(autouse=True)
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fused, "gpu_of", lambda device: H200)


def cost_of(match: Match, number: int) -> Cost:
    implementation = match.chain.implementations[number]
    return replace(implementation.cost(**match.calls), backward=implementation.backward_cost(gradients.training_of(match), **match.calls))


@pytest.mark.parametrize(("model", "dtype"), MEASURED, ids=lambda given: getattr(given, "chain", str(given)))
def test_inductors_kernels_are_counted_from_below(model: Headline, dtype: torch.dtype) -> None:
    rates, cost = RATES["NVIDIA H200"], cost_of(training_step(model, model.gpu_shape, dtype), 1)
    _, predicted = microseconds(replace(cost, convolution=None, backward=replace(cost.backward, convolutions=())), rates)
    assert 0.7 * MEASURED[model, dtype] < predicted < MEASURED[model, dtype]


@pytest.mark.parametrize("model", HEADLINES, ids=lambda model: model.chain)
def test_less_is_counted_where_less_is_asked_for(model: Headline) -> None:
    match = training_step(model, model.gpu_shape)
    backward = match.chain.implementations[1].backward_cost
    every, weight = (backward(needed, **match.calls) for needed in (gradients.training_of(match), Training(frozenset({"conv.weight"}))))
    assert weight.inductor.bytes < every.inductor.bytes and weight.op == every.op
    both = backward(Training(frozenset({"conv.weight", "conv.input"})), **match.calls)
    assert (len(weight.convolutions), len(both.convolutions)) == (1, 2)


@pytest.mark.parametrize(("model", "pieces"), [(NORM, 4), (GELU, 8)], ids=["conv_norm_pool_gelu", "conv_gelu_pool"])
def test_a_convolution_that_is_computed_again_comes_in_pieces(model: Headline, pieces: int) -> None:
    match = training_step(model, model.gpu_shape)
    recompute, save = (cost_of(match, number).backward for number in (0, 1))
    assert (recompute.pieces, save.pieces, save.again) == (pieces, 1, None)
    assert recompute.again == cost_of(match, 0).convolution and recompute.op.bytes == save.op.bytes


def test_the_norm_over_several_dimensions_has_torchs_own_backward() -> None:
    match = training_step(NORM, NORM.gpu_shape)
    own = cost_of(match, 1).backward.op
    norm = match.calls["norm"]
    planes = replace(match, calls={**match.calls, "norm": replace(norm, args={**norm.args, "normalized_shape": (64, 64)})})
    assert cost_of(planes, 1).backward.op.bytes > 5 * own.bytes


def test_torchs_own_ops_widen_16_bits() -> None:
    narrow, wide = (torchs_own(torch.empty(2, 3, dtype=dtype), 5).bytes for dtype in (torch.bfloat16, torch.float32))
    assert (narrow, wide) == (int(24 * (5 + 3) / 0.6), int(24 * 5 / 0.6))


def test_a_kernel_of_the_ops_own_counts_once_its_rate_is_known() -> None:
    """It is for steps that need no gradient of the input."""
    match = training_step(GELU, GELU.gpu_shape, torch.bfloat16)
    cost, rates = cost_of(match, 0), RATES["NVIDIA H200"]
    assert cost.backward.own.kernel == "conv_gelu_pool backward hopper bfloat16"
    known = replace(rates, kernels={**rates.kernels, cost.backward.own.kernel: Rate(600e6)})
    assert decide(cost, known, "auto", "auto").us < decide(cost, rates, "auto", "auto").us
    of_input = cost_of(training_step(GELU, GELU.gpu_shape, torch.bfloat16, of_input=True), 0)
    assert of_input.backward.own is None


CONVOLUTION = Convolution(bytes=10, flops=0, operand="tf32", channels_in=64)
FORWARD = Cost(Work(100, 1), Work(200, 1), CONVOLUTION)
SUMS = {
    "an inference": (FORWARD, (110, 210)),
    "a saved output": (replace(FORWARD, backward=BackwardCost(Work(7, 1), Work(70, 1), (CONVOLUTION,))), (127, 290)),
    "GELUs that take longer": (replace(FORWARD, backward=BackwardCost(Work(7, 1), Work(70, 1, gelus=75), (CONVOLUTION,))), (127, 295)),
    "one piece": (
        Cost(Work(100, 1, 5, "own"), Work(200, 1), CONVOLUTION, BackwardCost(Work(7, 1), Work(70, 1), again=CONVOLUTION)),
        (122, 280),
    ),
    "pieces": (
        Cost(
            Work(100, 1, 5, "own"), Work(200, 1), CONVOLUTION, BackwardCost(Work(7, 1), Work(70, 1), (CONVOLUTION,), CONVOLUTION, pieces=2)
        ),
        (105 + 7 + 2 * 10 + 0.1 * 7 * 20, 290),
    ),
    "a kernel of its own": (
        Cost(
            Work(100, 1, 5, "own"),
            Work(200, 1),
            CONVOLUTION,
            BackwardCost(Work(7, 1), Work(70, 1), (CONVOLUTION,), own=Work(3, 1, 4, "own")),
        ),
        (112, 290),
    ),
}


@pytest.mark.parametrize(("cost", "expected"), SUMS.values(), ids=SUMS)
def test_sums(cost: Cost, expected: tuple[float, float]) -> None:
    assert microseconds(cost, PLAIN) == pytest.approx(expected)


HOST = {"an inference": 0, "a saved output": 1000, "one piece": 2000, "pieces": 2000, "a kernel of its own": 1000}


@pytest.mark.parametrize(("name", "host"), HOST.items(), ids=HOST)
def test_the_hosts_time(name: str, host: float) -> None:
    cost, (own, theirs) = SUMS[name]
    assert microseconds(cost, replace(PLAIN, backward_call=1000.0, recompute_call=2000.0)) == pytest.approx((own + host, theirs))


def test_the_reason_says_that_a_graph_is_a_training_step() -> None:
    """Nobody need have thought of it: `model.eval()` does not turn gradients off."""
    tail = Cost(Work(100, 1), Work(200, 1))
    reasons = {backward: decide(tail, None, "always", backward).why for backward in (None, "auto", "save")}
    assert reasons == {None: 'select="always"', "auto": 'select="always", in a training step', "save": 'select="always"'}
