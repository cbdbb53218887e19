"""Choosing: for a match, the first implementation whose conditions hold and that is predicted not to be slower than Inductor.

Times are predicted (`fxfuse.predict`) with the rates of a measured device (`RATES`), of a call or, where the chain's result needs a gradient, of
a training step. On a device that was never measured the bytes decide, with a margin, and the report says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from .cost import Cost
from .predict import Rate, Rates, microseconds

# On a device that was never measured an op must save this share of the bytes that Inductor moves.
UNMEASURED_MARGIN = 0.2


@dataclass(frozen=True)
class Choice:
    """Whether to take an implementation, the sentence that the report shows for it, and predicted microseconds of it and of Inductor."""

    taken: bool
    why: str
    us: float | None = None
    inductor_us: float | None = None


def decide(cost: Cost | None, rates: Rates | None, select: str, backward: str | None = None) -> Choice:
    """Whether an implementation of this cost is taken under `select` ("auto", "always" or "tail"); one that states none is taken.

    backward: the option of that name where the chain's result needs a gradient, and None where it does not.
    """
    asked = demand(select, backward)
    if cost is None:
        return Choice(True, asked or "no cost given: taken wherever it can be")
    if cost.op.flops and select == "tail":
        return Choice(False, 'select="tail"')
    if cost.op.flops and backward == "save":
        return Choice(False, 'backward="save"')
    if asked:  # `backward` is "auto" where nobody thought of training: the sentence says what the graph is
        return Choice(True, f"{asked}, in a training step" if backward == "auto" else asked)
    step = "" if backward is None else " in a training step" if cost.backward else " in the forward of a training step"
    return _by_bytes(cost, step) if rates is None else _by_time(cost, rates, step)


def demand(select: str, backward: str | None) -> str:
    """The option that decides in the rule's place, as reports show it; empty where the rule decides."""
    if select != "auto":
        return f'select="{select}"'
    return "" if backward in (None, "auto") else f'backward="{backward}"'


def _by_time(cost: Cost, rates: Rates, step: str) -> Choice:
    op = cost.op
    if op.flops and op.kernel not in rates.kernels:
        return Choice(False, f"the {op.kernel} kernel was not measured on this device")
    own, theirs = microseconds(cost, rates)
    return Choice(own <= theirs, f"predicted {own:.0f} us{step}, Inductor at least {theirs:.0f} us", own, theirs)


def _by_bytes(cost: Cost, step: str) -> Choice:
    if cost.op.flops:
        return Choice(False, "a fused convolution is not taken on a device that was not measured")
    parts = [part for part in (cost, cost.backward) if part is not None]
    own, theirs = sum(part.op.bytes for part in parts), sum(part.inductor.bytes for part in parts)
    saved = 1 - own / max(theirs, 1)
    taken = saved >= UNMEASURED_MARGIN
    where = " after the convolution" if cost.convolution is not None else ""
    comparison = "at least" if taken else "less than"
    return Choice(
        taken,
        f"not measured on this device: moves {own:,} bytes{where}{step}, Inductor {theirs:,}; saves "
        f"{saved:.0%}, {comparison} the {UNMEASURED_MARGIN:.0%} asked for",
    )


# The H200's, in examples/results: the tails' bandwidth (tails_h200.json), Hopper kernels (headline_h200.json), and, fitted on sweep_h200.json:
# Inductor's GELUs, `call`, `start` and the rate beside it. In no file: conv_gelu_pool's portable kernels, timed while they were written, and
# the ceilings (cuBLAS products; fp32 FFMA for ieee), which differ with the run. `launch` is an assumption.
# Backwards: steps of training_h200.json take 7 to 14 % less than predicted with these. Their calls, of training_sweep_h200.json's steps below
# .6 ms: `recompute`'s is what their wall time was longer by than Inductor's in the median. `save`'s was 7 us longer; with less than 18 counted, a
# step is taken whose GPU time is longer (pools of one element in bf16).
RATES: Mapping[str, Rates] = {
    "NVIDIA H200": Rates(
        bandwidth=4.0e6,
        inductor_bandwidth=4.0e6,
        launch=3.0,
        call=3.5,
        backward_call=20.0,
        recompute_call=245.0,
        gelus=0.62e6,
        kernels={
            "conv_norm_pool_gelu hopper tf32": Rate(240e6),
            "conv_norm_pool_gelu hopper ieee": Rate(160e6),
            "conv_norm_pool_gelu hopper bfloat16": Rate(330e6),
            "conv_norm_pool_gelu hopper float16": Rate(330e6),
            "conv_norm_pool_gelu portable tf32": Rate(43e6, start=40.0),
            "conv_norm_pool_gelu portable ieee": Rate(20e6, start=40.0),
            "conv_norm_pool_gelu portable bfloat16": Rate(60e6, start=40.0),
            "conv_norm_pool_gelu portable float16": Rate(60e6, start=40.0),
            "conv_gelu_pool hopper tf32": Rate(450e6),
            "conv_gelu_pool hopper ieee": Rate(300e6),
            "conv_gelu_pool hopper bfloat16": Rate(604e6),
            "conv_gelu_pool hopper float16": Rate(604e6),
            "conv_gelu_pool portable tf32": Rate(217e6),
            "conv_gelu_pool portable ieee": Rate(96e6),
            "conv_gelu_pool portable deep ieee": Rate(52e6, start=30.0),
            "conv_gelu_pool portable bfloat16": Rate(282e6),
            "conv_gelu_pool portable float16": Rate(282e6),
            "conv_norm_pool_gelu backward hopper tf32": Rate(104e6),
            "conv_norm_pool_gelu backward hopper ieee": Rate(49e6),
            "conv_norm_pool_gelu backward hopper bfloat16": Rate(165e6),
            "conv_norm_pool_gelu backward hopper float16": Rate(165e6),
            "conv_gelu_pool backward hopper tf32": Rate(220e6, start=20.0),
            "conv_gelu_pool backward hopper ieee": Rate(125e6, start=20.0),
            "conv_gelu_pool backward hopper bfloat16": Rate(430e6, start=20.0),
            "conv_gelu_pool backward hopper float16": Rate(430e6, start=20.0),
        },
        ceilings={"tf32": 360e6, "ieee": 51e6, "bfloat16": 694e6, "float16": 694e6},
    ),
    # Two threads with AVX-512, in examples/results/sweep_cpu.json: of the tails the slowest (bf16), of Inductor's kernels the fastest.
    "cpu": Rates(bandwidth=1.0e4, inductor_bandwidth=0.6e4, launch=0.0, call=100.0, kernels={}, ceilings={}),
}


def rates_of(device: torch.device) -> Rates | None:
    """Measured rates of a device; None for a device that was never measured."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" and torch.cuda.is_available() else device.type
    return RATES.get(name)
