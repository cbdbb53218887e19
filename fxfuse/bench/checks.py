"""A contender's first call and what is read off it: error against fp64, peak memory, what fxfuse did."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from .. import torch_private
from ..command import in_a_word
from ..report import Report, reports
from .contenders import CONTENDERS, compiled
from .counts import Counts, free_bytes, reference_bytes
from .work import Errors, Work
from .workloads import Built


@dataclass(frozen=True)
class Reference:
    """The fp64 result, or the sentence why it is missing; eager's error, and that of rounding the operands to TF32 alone.

    zeros: what of the result is 0 in exact arithmetic, and in no error.
    """

    result: Any = None
    missing: str | None = None
    eager: float | None = None
    tf32: float | None = None
    zeros: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Run:
    """A contender that ran (call: once more), or the line why it did not. errors: none where there is no reference."""

    call: Callable[[], Any] | None = None
    failed: str | None = None
    errors: Errors = field(default_factory=dict)
    peak_mb: float | None = None
    op: str | None = None
    why: str | None = None


def reference(built: Built, work: Work, counts: Counts | None, tf32: bool, device: torch.device) -> Reference:
    """The reference of a workload, if it fits the memory."""
    needed, free = reference_bytes(*built, counts, work.held), free_bytes(device)
    if needed is not None and free is not None and needed > free:
        return Reference(missing=f"no fp64 reference: it takes about {needed / 1e9:.1f} GB and {free / 1e9:.1f} GB are free")
    try:
        result = work.reference(*built)
        rounded = worst(work.errors(work.tf32(*built), result)) if tf32 else None
    except Exception as error:
        return Reference(missing=f"no fp64 reference: {in_a_word(error)}")
    finally:
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return Reference(result, eager=_eager_error(built, work, result), tf32=rounded, zeros=work.zeros(result))


def worst(errors: Errors) -> float | None:
    """The largest error; nan where there is one."""
    return max(errors.values(), key=lambda error: math.inf if math.isnan(error) else error, default=None)


def _eager_error(built: Built, work: Work, result: Any) -> float | None:
    """None where eager itself has no kernel (a CPU's avg_pool3d in bf16) or no memory."""
    try:
        error = worst(work.errors(work.call(*built)(), result))
    except Exception:
        return None
    return error if error is not None and math.isfinite(error) else None


def run(name: str, built: Built, work: Work, expected: Reference, device: torch.device) -> Run:
    """Compiles and calls a contender."""
    before = reports()
    try:
        call = work.call(*compiled(CONTENDERS[name], built))
        found = call()
        errors = work.errors(found, expected.result) if expected.missing is None else {}
        del found
        peak = _peak_mb(call, device)
    except Exception as exception:
        return Run(failed=in_a_word(torch_private.cause(exception)))
    new = [report for report in reports() if not any(report is old for old in before)]
    op, why = _told(new) if name.startswith("fxfuse") else (None, None)
    return Run(call, errors=errors, peak_mb=peak, op=op, why=why)


def _peak_mb(call: Callable[[], Any], device: torch.device) -> float | None:
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    call()
    return (torch.cuda.max_memory_allocated(device) - before) / 1e6


def _told(new: list[Report]) -> tuple[str, str]:
    """The ops that the model's chains became, and why; "inductor" where all was left to it."""
    fused = [record for report in new for record in report.fused]
    declined = [record.reason for report in new for record in report.declined]
    stopped = [report.stopped for report in new if report.stopped]
    reasons = list(dict.fromkeys([*(record.choice for record in fused), *declined, *stopped]))
    return ", ".join(record.op for record in fused) or "inductor", "; ".join(reasons) or "no chain was found"
