"""A contender's first call and what is read off it: error against fp64, peak memory, what fxfuse did."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from .. import torch_private
from ..command import in_a_word
from ..measure import fp64_result, relative_error, tf32_result
from ..report import Report, reports
from .contenders import CONTENDERS, compiled
from .counts import Counts, free_bytes, reference_bytes
from .workloads import Built


@dataclass(frozen=True)
class Reference:
    """The fp64 result, or the sentence why it is missing; eager's error, and that of rounding the operands to TF32 alone."""

    result: Any = None
    missing: str | None = None
    eager: float | None = None
    tf32: float | None = None


@dataclass(frozen=True)
class Run:
    """A contender that ran (call: once more), or the line why it did not."""

    call: Callable[[], Any] | None = None
    failed: str | None = None
    error: float | None = None
    peak_mb: float | None = None
    op: str | None = None
    why: str | None = None


def reference(model: nn.Module, inputs: tuple[Any, ...], counts: Counts | None, tf32: bool, device: torch.device) -> Reference:
    """The reference of a workload, if it fits the memory."""
    needed, free = reference_bytes(model, inputs, counts), free_bytes(device)
    if needed is not None and free is not None and needed > free:
        return Reference(missing=f"no fp64 reference: it takes about {needed / 1e9:.1f} GB and {free / 1e9:.1f} GB are free")
    try:
        result = fp64_result(model, *inputs)
        rounded = relative_error(tf32_result(model, *inputs), result) if tf32 else None
    except Exception as error:
        return Reference(missing=f"no fp64 reference: {in_a_word(error)}")
    finally:
        if device.type == "cuda":
            torch.cuda.empty_cache()
    return Reference(result, eager=_eager_error(model, inputs, result), tf32=rounded)


def _eager_error(model: nn.Module, inputs: tuple[Any, ...], result: Any) -> float | None:
    """None where eager itself has no kernel (a CPU's avg_pool3d in bf16) or no memory."""
    try:
        error = relative_error(model(*inputs), result)
    except Exception:
        return None
    return error if math.isfinite(error) else None


def run(name: str, built: Built, expected: Reference, device: torch.device) -> Run:
    """Compiles and calls a contender."""
    before = reports()
    try:
        model, inputs = compiled(CONTENDERS[name], built)

        def call() -> Any:
            return model(*inputs)

        error = relative_error(call(), expected.result) if expected.missing is None else _called(call)
        peak = _peak_mb(call, device)
    except Exception as exception:
        return Run(failed=in_a_word(torch_private.cause(exception)))
    new = [report for report in reports() if not any(report is old for old in before)]
    op, why = _told(new) if name.startswith("fxfuse") else (None, None)
    return Run(call, error=error, peak_mb=peak, op=op, why=why)


def _called(call: Callable[[], Any]) -> None:
    call()


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
