"""One workload: every contender compiled, checked against fp64 and timed, and the rows that come of it."""

from __future__ import annotations

import dataclasses
import gc
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch

from .. import torch_private
from ..command import in_a_word
from .ceilings import Ceilings, number
from .checks import Reference, Run, reference, run, worst
from .contenders import applicable
from .counts import Counts, count
from .row import Row, beside_inductor, with_times
from .timing import timed
from .work import Work
from .workloads import Workload, switched


def measure(
    workload: Workload, work: Work, names: Sequence[str], device: torch.device, rounds: int, ceilings: Ceilings, say: Callable[[str], None]
) -> list[Row]:
    """A row for each contender that applies. say: is told what is going on."""
    kind = workload.kind
    blank = Row(workload.name, workload.chain, kind.dtype, kind.precision, kind.layout, [], "", training=work.training)
    try:
        with torch.set_grad_enabled(work.training), switched(kind.precision), torch_private.static_capture():
            return _measured(blank, workload, work, names, device, rounds, ceilings, say)
    except Exception as error:  # not a contender's: the model cannot be built, or runs out of memory on its own
        return [dataclasses.replace(blank, contender=name, failed=in_a_word(error)) for name in names]
    finally:
        torch._dynamo.reset()
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def _measured(
    blank: Row,
    workload: Workload,
    work: Work,
    names: Sequence[str],
    device: torch.device,
    rounds: int,
    ceilings: Ceilings,
    say: Callable[[str], None],
) -> list[Row]:
    built = workload.build(device)
    names = applicable(names, workload.kind, built[1])
    say(f"compiling {len(names)} contender{'' if len(names) == 1 else 's'}")
    with torch.no_grad():
        counts = count(*built)
    expected = reference(built, work, counts, tf32=bool(workload.chain) and workload.kind.precision == "tf32", device=device)
    runs = {name: run(name, built, work, expected, device) for name in names}
    for name, done in runs.items():
        if done.failed is not None:
            say(f"{name} failed: {done.failed}")
    times = timed({name: done.call for name, done in runs.items() if done.call is not None}, device, rounds)
    blank = dataclasses.replace(
        blank, inputs=[list(value.shape) for value in built[1] if isinstance(value, torch.Tensor)], **_facts(counts, expected, work)
    )
    rows = [with_times(_row(blank, name, done), times) for name, done in runs.items()]
    if work.training:
        peaks = {name: done.peak_mb for name, done in runs.items()}
        return [beside_inductor(row, times, peaks) for row in rows]
    return [_with_rates(row, ceilings) for row in rows]


def _facts(counts: Counts | None, expected: Reference, work: Work) -> dict[str, Any]:
    """What all rows of a workload have in common."""
    facts: dict[str, Any] = {"eager_error": expected.eager, "tf32_error": expected.tf32, "no_error": expected.missing}
    if work.training and expected.missing is None:
        facts["zeros"] = expected.zeros
    if counts is None:
        return facts
    cost = {} if work.training else {"flops": counts.flops, "bytes": counts.bytes}
    return {**facts, **cost, "input_mb": counts.input_bytes / 1e6, "output_mb": counts.output_bytes / 1e6}


def _row(blank: Row, name: str, done: Run) -> Row:
    row = dataclasses.replace(blank, contender=name, failed=done.failed, peak_mb=done.peak_mb, op=done.op, why=done.why)
    error = worst(done.errors)
    if error is not None and not math.isfinite(error):
        return dataclasses.replace(row, no_error=f"the error is {error}: the results differ in nan or inf")
    return dataclasses.replace(row, error=error, errors=done.errors if row.training and done.errors else None)


def _with_rates(row: Row, ceilings: Ceilings) -> Row:
    milliseconds = row.gpu_ms or row.wall_ms
    if not milliseconds or row.bytes is None:
        return row
    rates = (row.bytes / milliseconds * 1e3, row.flops / milliseconds * 1e3)
    shares = ceilings.shares(*rates, number(row.dtype, row.precision))
    return dataclasses.replace(row, bytes_per_s=rates[0], flops_per_s=rates[1], bytes_share=shares[0], flops_share=shares[1])
