"""Choosing: for a match, the first implementation whose conditions hold and that is predicted not to be slower than Inductor.

A prediction is a roofline: time = bytes / bandwidth + kernels * launch, with the rates of a device fitted to a committed sweep
(`examples/results/`). On a device with no fitted rates the bytes alone decide, with a margin, and the report says so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

# On a device that was never measured a kernel must save this share of the bytes that Inductor moves after the convolution.
UNMEASURED_MARGIN = 0.2


@dataclass(frozen=True)
class Cost:
    """What a chain costs after its convolution: bytes moved through memory, and kernels launched, by fxfuse and by Inductor."""

    bytes: int
    kernels: int
    inductor_bytes: int
    inductor_kernels: int


@dataclass(frozen=True)
class Rates:
    """A measured device. bandwidth: bytes a microsecond that the ops reach. launch: microseconds a kernel costs at least."""

    bandwidth: float
    launch: float


@dataclass(frozen=True)
class Choice:
    """Whether to take an implementation, and the sentence that the report shows for it."""

    taken: bool
    why: str


def decide(cost: Cost, rates: Rates | None, select: str) -> Choice:
    """Whether an implementation of this cost is taken under `select` ("auto" or "always")."""
    if select == "always":
        return Choice(True, 'select="always"')
    if rates is None:
        return _by_bytes(cost)
    own = cost.bytes / rates.bandwidth + cost.kernels * rates.launch
    inductor = cost.inductor_bytes / rates.bandwidth + cost.inductor_kernels * rates.launch
    return Choice(own <= inductor, f"predicted {own:.0f} us after the convolution, Inductor {inductor:.0f} us")


def _by_bytes(cost: Cost) -> Choice:
    saved = 1 - cost.bytes / max(cost.inductor_bytes, 1)
    taken = saved >= UNMEASURED_MARGIN
    comparison = "at least" if taken else "less than"
    return Choice(
        taken,
        f"moves {cost.bytes:,} bytes after the convolution, Inductor {cost.inductor_bytes:,}: saves {saved:.0%}, {comparison} the "
        f"{UNMEASURED_MARGIN:.0%} asked for on a device that was not measured",
    )


# Fitted to examples/results/ by `examples/sweep.py`.
RATES: Mapping[str, Rates] = {}


def rates_of(device: torch.device) -> Rates | None:
    """Fitted rates of a device; None for a device that was never measured."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" and torch.cuda.is_available() else device.type
    return RATES.get(name)
