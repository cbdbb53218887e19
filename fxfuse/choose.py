"""Choosing: for a match, the first implementation whose conditions hold and that is predicted not to be slower than Inductor.

A prediction is a sum: bytes / bandwidth (or GELUs / their rate, where they take longer) + operations / their rate + kernels * launch, with
the rates of a measured device (`RATES`). A convolution that is left to its library counts by its floor, the larger of its bytes and its
operations at the device's ceiling: a fused one is taken only where it beats a convolution that no library reaches. On a device that was
never measured the bytes decide, with a margin, and the report says so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

# On a device that was never measured an op must save this share of the bytes that Inductor moves.
UNMEASURED_MARGIN = 0.2

# With so few input channels no library's kernel came nearer to its floor than about this, in the H200's sweep where that is over 15 us.
FEW_CHANNELS, OVER_FLOOR = 32, 2.0


@dataclass(frozen=True)
class Convolution:
    """A convolution in a kernel of its library. bytes: of input, weight and output. operand: what it multiplies, whose ceiling holds."""

    bytes: int
    flops: float
    operand: str
    channels_in: int


@dataclass(frozen=True)
class Work:
    """What an op does. bytes: read and written. flops: operations of the convolution inside it, or as many as take as long, at the rate of
    `kernel`; 0 where the convolution is left to its library. gelus: how many Inductor's kernels compute."""

    bytes: int
    kernels: int
    flops: float = 0.0
    kernel: str = ""
    gelus: float = 0.0


@dataclass(frozen=True)
class Cost:
    """An implementation's op, what Inductor's kernels do instead, and the convolution in front of them that is left to its library either
    way, if the chain starts at one: `inductor` leaves it out, and so does `op` unless the op contains it (its `flops` say so)."""

    op: Work
    inductor: Work
    convolution: Convolution | None = None


@dataclass(frozen=True)
class Rate:
    """Of a fused convolution's kernel. flops: operations a microsecond; start: microseconds that it takes beside, on any work."""

    flops: float
    start: float = 0.0


@dataclass(frozen=True)
class Rates:
    """A measured device. bandwidth, inductor_bandwidth: bytes a microsecond that the ops and Inductor's kernels reach. launch: microseconds a
    kernel costs at least; call: what a call of an op costs beyond that. gelus: how many Inductor's kernels compute in a microsecond.

    kernels: of fused convolutions. ceilings: operations a microsecond, the most that any kernel reaches on the device, by operand.
    """

    bandwidth: float
    inductor_bandwidth: float
    launch: float
    call: float
    kernels: Mapping[str, Rate]
    ceilings: Mapping[str, float]
    gelus: float = math.inf


@dataclass(frozen=True)
class Choice:
    """Whether to take an implementation, the sentence that the report shows for it, and predicted microseconds of it and of Inductor."""

    taken: bool
    why: str
    us: float | None = None
    inductor_us: float | None = None


def decide(cost: Cost | None, rates: Rates | None, select: str) -> Choice:
    """Whether an implementation of this cost is taken under `select` ("auto", "always" or "tail"); one that states none is taken."""
    if cost is None:
        return Choice(True, "no cost given: taken wherever it can be" if select == "auto" else f'select="{select}"')
    if select == "tail" and cost.op.flops:
        return Choice(False, 'select="tail"')
    if select != "auto":
        return Choice(True, f'select="{select}"')
    return _by_bytes(cost) if rates is None else _by_time(cost, rates)


def _by_time(cost: Cost, rates: Rates) -> Choice:
    op, inductor = cost.op, cost.inductor
    if op.flops and op.kernel not in rates.kernels:
        return Choice(False, f"the {op.kernel} kernel was not measured on this device")
    convolution = _floor(cost.convolution, rates)
    own = op.bytes / rates.bandwidth + op.kernels * rates.launch + rates.call
    own += _work(op, rates) if op.flops else convolution
    theirs = max(inductor.bytes / rates.inductor_bandwidth, inductor.gelus / rates.gelus) + inductor.kernels * rates.launch + convolution
    return Choice(own <= theirs, f"predicted {own:.0f} us, Inductor at least {theirs:.0f} us", own, theirs)


def _work(op: Work, rates: Rates) -> float:
    rate = rates.kernels[op.kernel]
    return op.flops / rate.flops + rate.start


def _floor(convolution: Convolution | None, rates: Rates) -> float:
    """Microseconds that no kernel of a library falls under; 0 where the device has no ceiling for the operand."""
    if convolution is None or convolution.operand not in rates.ceilings:
        return 0.0
    floor = max(convolution.bytes / rates.bandwidth, convolution.flops / rates.ceilings[convolution.operand])
    return floor * (OVER_FLOOR if convolution.channels_in <= FEW_CHANNELS else 1.0) + rates.launch


def _by_bytes(cost: Cost) -> Choice:
    if cost.op.flops:
        return Choice(False, "a fused convolution is not taken on a device that was not measured")
    saved = 1 - cost.op.bytes / max(cost.inductor.bytes, 1)
    taken = saved >= UNMEASURED_MARGIN
    where = " after the convolution" if cost.convolution is not None else ""
    comparison = "at least" if taken else "less than"
    return Choice(
        taken,
        f"not measured on this device: moves {cost.op.bytes:,} bytes{where}, Inductor {cost.inductor.bytes:,}; saves "
        f"{saved:.0%}, {comparison} the {UNMEASURED_MARGIN:.0%} asked for",
    )


# The H200's, in examples/results: the tails' bandwidth (tails_h200.json), Hopper kernels (headline_h200.json), and, fitted on sweep_h200.json:
# Inductor's GELUs, `call`, `start` and the rate beside it. In no file: conv_gelu_pool's portable kernels, timed while they were written, and
# the ceilings (cuBLAS products; fp32 FFMA for ieee), which differ with the run. `launch` is an assumption.
RATES: Mapping[str, Rates] = {
    "NVIDIA H200": Rates(
        bandwidth=4.0e6,
        inductor_bandwidth=4.0e6,
        launch=3.0,
        call=3.5,
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
