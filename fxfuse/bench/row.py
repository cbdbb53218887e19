"""A row of the JSON file: a contender on a workload, and how its times compare to the others'."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..measure import medians, ratio_quartiles
from .timing import Times

# `auto` may take this much longer than the faster of Inductor and the tail op.
AUTO_WITHIN = 1.02


@dataclass(frozen=True)
class Row:
    """A contender on a workload. Whatever was not measured is None.

    training: whether a training step is what was measured, else a call. failed: why the contender has no figures. over_inductor, over_other: lower
    quartile, median and upper quartile, over the rounds, of its time over Inductor's and over that of `other`, the fastest of the others that are
    not fxfuse. over_best_inductor: the same over `best_inductor`, the fastest that is Inductor's, and peak_over_best_inductor its peak memory over
    that one's; of training only. timed_by: how GPU times were taken.
    error: relative to fp64, the worst of `errors` where the work has several results (a training step's gradients, by parameter), beside eager's
    worst and that of TF32 rounding alone; zeros: gradients that are in no error, as they are 0 in exact arithmetic; no_error: why it is missing.
    peak_mb: beyond what was allocated before the call or step, the result or gradients included. flops, bytes: at least what a call takes (None in
    training); the rates are these over its time, the shares those of the ceilings. op, why: what fxfuse made of the model. auto: of contender
    "fxfuse", its time over the faster of Inductor and the tail op.
    """

    workload: str
    chain: str
    dtype: str
    precision: str
    layout: str
    inputs: list[list[int]]
    contender: str
    training: bool = False
    failed: str | None = None
    gpu_ms: float | None = None
    wall_ms: float | None = None
    timed_by: str | None = None
    over_inductor: tuple[float, float, float] | None = None
    other: str | None = None
    over_other: tuple[float, float, float] | None = None
    best_inductor: str | None = None
    over_best_inductor: tuple[float, float, float] | None = None
    peak_over_best_inductor: float | None = None
    error: float | None = None
    errors: dict[str, float] | None = None
    zeros: list[str] | None = None
    eager_error: float | None = None
    tf32_error: float | None = None
    no_error: str | None = None
    peak_mb: float | None = None
    input_mb: float | None = None
    output_mb: float | None = None
    flops: float | None = None
    bytes: int | None = None
    bytes_per_s: float | None = None
    flops_per_s: float | None = None
    bytes_share: float | None = None
    flops_share: float | None = None
    op: str | None = None
    why: str | None = None
    auto: dict[str, Any] | None = None


def with_times(row: Row, times: Times) -> Row:
    """The row with what was measured in turn with the others."""
    name, compared = row.contender, times.compared
    if name not in compared:
        return dataclasses.replace(row, failed=row.failed or times.failed.get(name))
    other = _fastest(compared, lambda rival: rival != name and not rival.startswith("fxfuse"))
    return dataclasses.replace(
        row,
        gpu_ms=medians(times.gpu).get(name),
        wall_ms=medians(times.wall)[name],
        timed_by=times.timed_by.get(name),
        over_inductor=ratio_quartiles(compared, name, "inductor") if "inductor" in compared else None,
        other=other,
        over_other=ratio_quartiles(compared, name, other) if other else None,
        auto=_auto(compared) if name == "fxfuse" else None,
    )


def beside_inductor(row: Row, times: Times, peaks: dict[str, float | None]) -> Row:
    """The row with its time and peak memory, of `peaks` in MB by contender, over those of the fastest of Inductor's contenders."""
    compared = times.compared
    best = _fastest(compared, lambda rival: rival.startswith("inductor"))
    if best is None or row.contender not in compared:
        return row
    peak = row.peak_mb / peaks[best] if row.peak_mb is not None and peaks[best] else None
    over = ratio_quartiles(compared, row.contender, best)
    return dataclasses.replace(row, best_inductor=best, over_best_inductor=over, peak_over_best_inductor=peak)


def _fastest(compared: dict[str, list[float]], counts: Callable[[str], bool]) -> str | None:
    return min(filter(counts, compared), key=medians(compared).get, default=None)


def _auto(compared: dict[str, list[float]]) -> dict[str, Any] | None:
    """`auto` beside the faster of Inductor and the tail op: within AUTO_WITHIN of it; slower beyond the noise, so that even the lower quartile of
    the ratio is above that."""
    rival = _fastest(compared, lambda name: name in ("inductor", "fxfuse tail"))
    if rival is None:
        return None
    over = ratio_quartiles(compared, "fxfuse", rival)
    return {"rival": rival, "over_rival": over, "within": over[1] <= AUTO_WITHIN, "slower": over[0] > AUTO_WITHIN}
