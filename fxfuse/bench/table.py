"""Tables and closing sentences of a run, for people."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tabulate import tabulate

from .results import groups, name_of, rivals

Rows = Sequence[dict[str, Any]]
Column = Callable[[dict[str, Any]], str]
UNITS = {"T": 1e12, "G": 1e9}


def text(result: dict[str, Any]) -> str:
    """Everything that stdout shows."""
    rows = result["rows"]
    if not rows:
        return "nothing was measured"
    if result["suite"] == "tails":
        return _tails([{"bytes_per_s": None, **row} for row in rows])
    body = _by_shape(rows) if result["suite"] == "sweep" else _by_contender(rows)
    return "\n\n".join(filter(None, (_ceilings(result["ceilings"]), body, *_notes(rows), _verdict(rows) if result["suite"] == "sweep" else "")))


def _ceilings(ceilings: dict[str, Any]) -> str:
    products = ", ".join(f"{number} {flops / 1e12:.3g}" for number, flops in ceilings["flops_per_s"].items())
    return f"ceilings: a copy {ceilings['bytes_per_s'] / 1e9:,.0f} GB/s; matrix products, TFLOP/s: {products}"


def _by_contender(rows: Rows) -> str:
    """A line for each contender, under its workload."""
    columns = _columns(rows)
    lines: list[list[str]] = []
    for members in groups(rows).values():
        kind = " ".join(filter(None, (members[0][key] for key in ("dtype", "precision", "layout"))))
        labels = [members[0]["workload"], kind] + [""] * max(len(members) - 2, 0)
        cells = [_cells(row, columns) for row in members] + [[]] * (2 - len(members))
        lines += [[label, *cell] for label, cell in zip(labels, cells)] + [[]]
    return tabulate(lines[:-1], headers=["workload", "contender", *columns, "became"], disable_numparse=True)


def _columns(rows: Rows) -> dict[str, Column]:
    """What is shown of a row, by header; columns that no row fills are left out."""
    unit = _unit(rows)
    columns: dict[str, Column] = {
        "GPU ms": lambda row: _number(row["gpu_ms"], ".3f"),
        "wall ms": lambda row: _number(row["wall_ms"], ".3f"),
        "/ inductor": lambda row: _middle(row["over_inductor"]),
        "/ best inductor": lambda row: _middle(row["over_best_inductor"]),
        "error": lambda row: _number(row["error"], ".1e"),
        "eager's": lambda row: _number(row["eager_error"], ".1e"),
        "TF32's": lambda row: _number(row["tf32_error"], ".1e"),
        "peak MB": lambda row: _number(row["peak_mb"], ".1f"),
        "peak / its": lambda row: _number(row["peak_over_best_inductor"], ".2f"),
        "output MB": lambda row: _number(row["output_mb"], ".1f"),
        f"{unit}B/s": lambda row: _rate(row["bytes_per_s"], row["bytes_share"], unit),
        f"{unit}FLOP/s": lambda row: _rate(row["flops_per_s"], row["flops_share"], unit),
    }
    return {header: column for header, column in columns.items() if any(column(row) for row in rows)}


def _cells(row: dict[str, Any], columns: dict[str, Column]) -> list[str]:
    if row["failed"]:
        # In a word: the file holds the sentence.
        return [row["contender"], *[""] * len(columns), f"failed: {row['failed'].partition(':')[0]}"]
    by_events = " (events)" if (row["timed_by"] or "").startswith("events") else ""
    return [row["contender"] + by_events, *(column(row) for column in columns.values()), row["op"] or ""]


def _by_shape(rows: Rows) -> str:
    """A line for each shape, the contenders' times side by side, in training with peak memory."""
    names = list(dict.fromkeys(row["contender"] for row in rows))
    lines = []
    for name, members in groups(rows).items():
        by_name = {row["contender"]: row for row in members}
        own = by_name.get("fxfuse", members[-1])
        auto = own["auto"] or {}
        over = auto.get("over_rival")
        errors = [row["error"] for row in members if row["contender"].startswith("fxfuse") and row["error"] is not None]
        times = [_time(by_name.get(contender)) for contender in names]
        spread = f"{over[1]:.2f} ({over[0]:.2f}-{over[2]:.2f})" if over else ""
        lines.append([name, *times, spread, _number(max(errors, default=None), ".1e"), _number(own["eager_error"], ".1e"), own["op"] or ""])
    unit = "ms, MB" if any(row["training"] and row["peak_mb"] is not None for row in rows) else "ms"
    headers = ["shape", *(f"{name} {unit}" for name in names), "auto / best", "error", "eager's", "auto became"]
    return tabulate(lines, headers=headers, disable_numparse=True)


def _time(row: dict[str, Any] | None) -> str:
    if row is None:
        return ""
    if row["failed"]:
        return row["failed"].partition(":")[0]
    peak = f", {row['peak_mb']:.0f}" if row["training"] and row["peak_mb"] is not None else ""
    return _number(row["gpu_ms"] or row["wall_ms"], ".4f") + peak


def _tails(rows: Rows) -> str:
    unit = _unit(rows)
    headers = ["op", "dtype", "layout", "ms", f"{unit}B/s", f"copy {unit}B/s", "share"]
    return tabulate([_tail(row, unit) for row in rows], headers=headers, disable_numparse=True)


def _tail(row: dict[str, Any], unit: str) -> list[str]:
    own = [row["op"], row["dtype"], row["layout"]]
    if row["failed"]:
        return [*own, f"failed: {row['failed']}"]
    rates = (f"{row[key] / UNITS[unit]:.3g}" for key in ("bytes_per_s", "copy_bytes_per_s"))
    return [*own, f"{row['ms']:.3f}", *rates, f"{row['share']:.0%}"]


def _notes(rows: Rows) -> list[str]:
    """Each failure once, why errors are missing, and of training those above the bound."""
    failures = [f"{row['contender']} failed: {row['failed']}" for row in rows if row["failed"]]
    missing = [f"{name}: {members[0]['no_error']}" for name, members in groups(rows).items() if members[0]["no_error"]]
    return ["\n".join(dict.fromkeys([*failures, *missing, *filter(None, map(_above, rows))]))]


def _above(row: dict[str, Any]) -> str:
    """Where fxfuse's gradients are further from fp64 than twice eager's, or twice what TF32 stands for."""
    bound = 2 * max(row["eager_error"] or 0.0, row["tf32_error"] or 0.0)
    if not (row["training"] and row["contender"].startswith("fxfuse") and bound and row["error"] and row["error"] > bound):
        return ""
    worst = max(row["errors"], key=row["errors"].get)
    return f"{name_of(row)}: {row['contender']}'s gradient of {worst} errs by {row['error']:.1e}, above {bound:.1e}"


def _verdict(rows: Rows) -> str:
    """Whether `auto` was the right choice."""
    judged = [row for row in rows if row["auto"]]
    within = sum(row["auto"]["within"] for row in judged)
    slower = [name for name, members in groups(rows).items() if any((row["auto"] or {}).get("slower") for row in members)]
    sentence = f"auto within 1.02x of {rivals(rows)}: {within} of {len(judged)}; slower beyond the noise of the rounds: {len(slower)}"
    return "\n  ".join([sentence, *slower])


def _unit(rows: Rows) -> str:
    """The prefix that rates are shown with."""
    return "T" if max((row["bytes_per_s"] or 0.0 for row in rows), default=0.0) > 1e11 else "G"


def _rate(rate: float | None, share: float | None, unit: str) -> str:
    return "" if rate is None else f"{rate / UNITS[unit]:.3g}" + ("" if share is None else f" ({share:.0%})")


def _middle(quartiles: Sequence[float] | None) -> str:
    return _number(quartiles and quartiles[1], ".2f")


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)
