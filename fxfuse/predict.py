"""Predicting: the microseconds of an implementation and of Inductor, of a call or of a training step.

A prediction is a sum: bytes / bandwidth (or GELUs / their rate, where they take longer) + operations / their rate + kernels * launch. A
convolution that is left to its library counts by its floor, the larger of its bytes and its operations at the device's ceiling: a fused one is
taken only where it beats a convolution that no library reaches.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from .cost import BackwardCost, Convolution, Cost, Work

# With so few input channels no library's kernel came nearer to its floor than about this, in the H200's sweep where that is over 15 us.
FEW_CHANNELS, OVER_FLOOR = 32, 2.0

# What pieces of the batch add to a convolution's time (7 to 11 % for conv_norm_pool_gelu's headline model, where recomputing in channels_last saves
# more than that if inputs are contiguous), and how many times their floor cuDNN's forward and gradients took at most but for one (14 times), with 8
# and 32 input channels in fp32 and bf16 on an H200: an upper bound of what the pieces add.
PIECES, MOST_OVER_FLOOR = 0.1, 7.0


@dataclass(frozen=True)
class Rate:
    """Of a fused convolution's kernel. flops: operations a microsecond; start: microseconds that it takes beside, on any work."""

    flops: float
    start: float = 0.0


@dataclass(frozen=True)
class Rates:
    """A measured device. bandwidth, inductor_bandwidth: bytes a microsecond that the ops and Inductor's kernels reach. launch: microseconds a
    kernel costs at least; call: what a call of an op costs beyond that. gelus: how many Inductor's kernels compute in a microsecond.
    backward_call, recompute_call: what a backward's call must save beside, and one that computes a convolution again by its library: they are
    Python, and where a step is short nothing hides the host's time.

    kernels: of fused convolutions. ceilings: operations a microsecond, the most that any kernel reaches on the device, by operand.
    """

    bandwidth: float
    inductor_bandwidth: float
    launch: float
    call: float
    kernels: Mapping[str, Rate]
    ceilings: Mapping[str, float]
    gelus: float = math.inf
    backward_call: float = 0.0
    recompute_call: float = 0.0


def microseconds(cost: Cost, rates: Rates) -> tuple[float, float]:
    """Of an implementation, whose kernels have rates, and of Inductor at least."""
    convolution = _floor(cost.convolution, rates)
    own = _ops(cost.op, rates) + (0.0 if cost.op.flops else convolution)
    theirs = _inductors(cost.inductor, rates) + convolution
    if cost.backward is None:
        return own, theirs
    return own + _backward(cost.backward, rates), theirs + _inductors(cost.backward.inductor, rates) + _floors(cost.backward, rates)


def _ops(op: Work, rates: Rates) -> float:
    around = op.bytes / rates.bandwidth + op.kernels * rates.launch + rates.call
    if not op.flops:
        return around
    rate = rates.kernels[op.kernel]
    return around + op.flops / rate.flops + rate.start


def _inductors(work: Work, rates: Rates) -> float:
    return max(work.bytes / rates.inductor_bandwidth, work.gelus / rates.gelus) + work.kernels * rates.launch


def _backward(backward: BackwardCost, rates: Rates) -> float:
    """Microseconds of an op's backward. What it computes again is as fast as Inductor's forward, whose floor counts on both sides, but for
    the pieces."""
    if backward.own is not None and backward.own.kernel in rates.kernels:
        return rates.backward_call + _ops(backward.own, rates)
    host = rates.backward_call if backward.again is None else rates.recompute_call
    whole = host + _ops(backward.op, rates) + _floors(backward, rates) + _floor(backward.again, rates)
    if backward.again is None or backward.pieces == 1:
        return whole
    return whole + PIECES * MOST_OVER_FLOOR * sum(_least(convolution, rates) for convolution in (backward.again, *backward.convolutions))


def _floors(backward: BackwardCost, rates: Rates) -> float:
    return sum(_floor(convolution, rates) for convolution in backward.convolutions)


def _floor(convolution: Convolution | None, rates: Rates) -> float:
    """Microseconds that no kernel of a library falls under; 0 where the device has no ceiling for the operand."""
    least = _least(convolution, rates)
    few = convolution is not None and convolution.channels_in <= FEW_CHANNELS
    return least * (OVER_FLOOR if few else 1.0) + (rates.launch if least else 0.0)


def _least(convolution: Convolution | None, rates: Rates) -> float:
    """Microseconds at the device's ceilings."""
    if convolution is None or convolution.operand not in rates.ceilings:
        return 0.0
    return max(convolution.bytes / rates.bandwidth, convolution.flops / rates.ceilings[convolution.operand])
