"""`fxfuse demo`: both headline models on the device at hand: what they become, their error, and their time beside eager and Inductor."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch
from tabulate import tabulate

from . import precision
from .chain import chain_names
from .headline import HEADLINES, Headline
from .measure import fp64_result, medians, paired_times, ratio, relative_error, tf32_result
from .options import split
from .report import Report, reports

ROUNDS = 31
# A fused result may err twice as much as eager's does, or as rounding the operands to TF32 does where the switches allow that; and by
# fp32 rounding noise.
ERROR_FACTOR, ERROR_FLOOR = 2.0, 1e-6


@dataclass(frozen=True)
class Result:
    """One headline model: its op (None if the chain was not fused) or why not, errors against fp64, milliseconds.

    errors: by contender, and of TF32 rounding alone under "tf32" (0 where it is not allowed). speedup: Inductor's time over fxfuse's, median
    over the rounds.
    """

    headline: Headline
    shape: tuple[int, ...]
    op: str | None
    reason: str
    errors: dict[str, float]
    times: dict[str, float]
    speedup: float

    def failures(self) -> list[str]:
        """Sentences for what is wrong with this result; empty if all is well."""
        if self.op is None:
            return [f"{self.headline.chain} was not fused: {self.reason}"]
        allowed = max(ERROR_FACTOR * self.errors["eager"], ERROR_FACTOR * self.errors["tf32"], ERROR_FLOOR)
        if not self.errors["fxfuse"] <= allowed:
            return [f"{self.headline.chain} errs by {self.errors['fxfuse']:.1e} against fp64, more than the allowed {allowed:.1e}"]
        return []


def run(device: torch.device) -> list[Result]:
    """Compiles, checks and times every headline model on `device` under `torch.no_grad()`."""
    with torch.no_grad():
        return [_run_one(headline, device) for headline in HEADLINES]


def _run_one(headline: Headline, device: torch.device) -> Result:
    print(f"fxfuse: {headline.chain} on {device}: compiling with inductor and fxfuse", file=sys.stderr, flush=True)
    torch.manual_seed(0)
    model = headline.make().to(device)
    shape = headline.shape(device)
    x = torch.rand(shape, device=device)
    contenders = {
        "eager": model,
        "inductor": torch.compile(model, backend="inductor"),
        # Whatever the rule for this device says: the demo is there to show the fused op.
        "fxfuse": torch.compile(model, backend="fxfuse", options={"fxfuse.select": "always"}),
    }
    reference = fp64_result(model, x)
    errors = {name: relative_error(contender(x), reference) for name, contender in contenders.items()}
    tf32 = device.type == "cuda" and precision.current() == "tf32"
    errors["tf32"] = relative_error(tf32_result(model, x), reference) if tf32 else 0.0
    del reference
    times = paired_times({name: lambda c=contender: c(x) for name, contender in contenders.items()}, device, ROUNDS)
    report = next((r for r in reversed(reports())), Report())
    fused = [f for f in report.fused if f.chain == headline.chain]
    reasons = [d.reason for d in report.declined if d.chain == headline.chain] or ["the chain was not found"]
    return Result(headline, shape, fused[0].op if fused else None, reasons[0], errors, medians(times), ratio(times, "inductor", "fxfuse"))


def table(results: list[Result]) -> str:
    """The demo's table."""
    rows = [
        (
            r.headline.chain,
            "x".join(map(str, r.shape)),
            r.op or "not fused",
            f"{r.errors['fxfuse']:.1e}",
            f"{r.errors['eager']:.1e}",
            *(f"{r.times[name]:.3f}" for name in ("eager", "inductor", "fxfuse")),
            f"{r.speedup:.2f}x",
        )
        for r in results
    ]
    headers = ("chain", "input", "became", "error", "eager's error", "eager ms", "inductor ms", "fxfuse ms", "vs inductor")
    return tabulate(rows, headers=headers, disable_numparse=True)


def main() -> int:
    """Runs the demo on the GPU if there is one, else on the CPU; 1 with a sentence on stderr if a result is wrong or a chain not fused."""
    split(None, chain_names())  # a variable that makes no sense is said before anything slow happens
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    results = run(device)
    print(table(results))
    failures = [failure for result in results for failure in result.failures()]
    for failure in failures:
        print(f"fxfuse: {failure}. `fxfuse doctor` shows what is installed and what to do.", file=sys.stderr)
    return 1 if failures else 0
