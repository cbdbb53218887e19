"""One workload: every contender compiled, checked against fp64 and timed, and the rows that come of it."""

from __future__ import annotations

import dataclasses
import gc
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .. import torch_private
from ..command import in_a_word
from ..measure import medians, ratio_quartiles
from .ceilings import Ceilings, number
from .checks import Reference, Run, reference, run
from .contenders import applicable
from .counts import Counts, count
from .timing import Times, timed
from .workloads import Workload, switched

# `auto` may take this much longer than the faster of Inductor and the tail op.
AUTO_WITHIN = 1.02


@dataclass(frozen=True)
class Row:
    """A contender on a workload. Whatever was not measured is None.

    failed: why the contender has no figures. over_inductor, over_other: lower quartile, median and upper quartile, over the rounds, of its time
    over Inductor's and over that of `other`, the fastest of the others that are not fxfuse. timed_by: how GPU times were taken.
    error: relative to fp64, beside eager's and that of TF32 rounding alone; no_error: why it is missing. peak_mb: beyond what was allocated
    before the call, the result included. flops, bytes: at least what a call takes; the rates are these over its time, the shares those of the
    ceilings. op, why: what fxfuse made of the model. auto: of contender "fxfuse", its time over the faster of Inductor and the tail op.
    """

    workload: str
    chain: str
    dtype: str
    precision: str
    layout: str
    inputs: list[list[int]]
    contender: str
    failed: str | None = None
    gpu_ms: float | None = None
    wall_ms: float | None = None
    timed_by: str | None = None
    over_inductor: tuple[float, float, float] | None = None
    other: str | None = None
    over_other: tuple[float, float, float] | None = None
    error: float | None = None
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


def measure(
    workload: Workload, names: Sequence[str], device: torch.device, rounds: int, ceilings: Ceilings, say: Callable[[str], None]
) -> list[Row]:
    """A row for each contender that applies. say: is told what is going on."""
    kind = workload.kind
    blank = Row(workload.name, workload.chain, kind.dtype, kind.precision, kind.layout, [], "")
    try:
        with torch.no_grad(), switched(kind.precision), torch_private.static_capture():
            return _measured(blank, workload, names, device, rounds, ceilings, say)
    except Exception as error:  # not a contender's: the model cannot be built, or runs out of memory on its own
        return [dataclasses.replace(blank, contender=name, failed=in_a_word(error)) for name in names]
    finally:
        torch._dynamo.reset()
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _measured(
    blank: Row, workload: Workload, names: Sequence[str], device: torch.device, rounds: int, ceilings: Ceilings, say: Callable[[str], None]
) -> list[Row]:
    built = workload.build(device)
    names = applicable(names, workload.kind, built[1])
    say(f"compiling {len(names)} contender{'' if len(names) == 1 else 's'}")
    counts = count(*built)
    expected = reference(*built, counts, tf32=bool(workload.chain) and workload.kind.precision == "tf32", device=device)
    runs = {name: run(name, built, expected, device) for name in names}
    for name, done in runs.items():
        if done.failed is not None:
            say(f"{name} failed: {done.failed}")
    times = timed({name: done.call for name, done in runs.items() if done.call is not None}, device, rounds)
    blank = dataclasses.replace(blank, inputs=[list(value.shape) for value in built[1] if isinstance(value, torch.Tensor)], **_facts(counts, expected))
    rows = [_with_times(_row(blank, name, done), name, times) for name, done in runs.items()]
    return [_with_rates(row, ceilings) for row in rows]


def _facts(counts: Counts | None, expected: Reference) -> dict[str, Any]:
    """What all rows of a workload have in common."""
    errors = {"eager_error": expected.eager, "tf32_error": expected.tf32, "no_error": expected.missing}
    if counts is None:
        return errors
    return {**errors, "flops": counts.flops, "bytes": counts.bytes, "input_mb": counts.input_bytes / 1e6, "output_mb": counts.output_bytes / 1e6}


def _row(blank: Row, name: str, done: Run) -> Row:
    row = dataclasses.replace(blank, contender=name, failed=done.failed, peak_mb=done.peak_mb, op=done.op, why=done.why)
    if done.error is not None and not math.isfinite(done.error):
        return dataclasses.replace(row, no_error=f"the error is {done.error}: the results differ in nan or inf")
    return dataclasses.replace(row, error=done.error)


def _with_times(row: Row, name: str, times: Times) -> Row:
    """The row with what was measured in turn with the others."""
    compared = times.compared
    if name not in compared:
        return dataclasses.replace(row, failed=row.failed or times.failed.get(name))
    middle = medians(compared)
    other = min((rival for rival in compared if rival != name and not rival.startswith("fxfuse")), key=middle.get, default=None)
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


def _auto(compared: dict[str, list[float]]) -> dict[str, Any] | None:
    """`auto` beside the faster of Inductor and the tail op: within AUTO_WITHIN of it; slower beyond the noise, so that even the lower quartile of
    the ratio is above that."""
    middle = medians(compared)
    rival = min((name for name in ("inductor", "fxfuse tail") if name in compared), key=middle.get, default=None)
    if rival is None:
        return None
    over = ratio_quartiles(compared, "fxfuse", rival)
    return {"rival": rival, "over_rival": over, "within": over[1] <= AUTO_WITHIN, "slower": over[0] > AUTO_WITHIN}


def _with_rates(row: Row, ceilings: Ceilings) -> Row:
    milliseconds = row.gpu_ms or row.wall_ms
    if not milliseconds or row.bytes is None:
        return row
    rates = (row.bytes / milliseconds * 1e3, row.flops / milliseconds * 1e3)
    shares = ceilings.shares(*rates, number(row.dtype, row.precision))
    return dataclasses.replace(row, bytes_per_s=rates[0], flops_per_s=rates[1], bytes_share=shares[0], flops_share=shares[1])
