"""README's figures are those of the committed result files."""

from __future__ import annotations

import json
import math
import re
from dataclasses import fields
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from fxfuse.options import Options

ROOT = Path(__file__).parent.parent
COLUMNS = {"eager": "eager", "inductor": "inductor", "inductor, channels_last": "inductor channels_last", "fxfuse": "fxfuse"}

pytestmark = pytest.mark.skipif(not (ROOT / "examples/results").exists(), reason="an sdist has no result files")


def rows_of(file: str) -> list[dict[str, Any]]:
    return json.loads((ROOT / "examples/results" / file).read_text())["rows"]


def table(header: str) -> list[dict[str, str]]:
    """README's table whose first line begins so, as a dict a row."""
    lines = (ROOT / "README.md").read_text().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith(header))
    cells = [[cell.strip(" `*") for cell in line.strip("|").split("|")] for line in lines[start:]]
    body = cells[2 : next(i for i, row in enumerate(cells) if len(row) < 2)]
    return [dict(zip(cells[0], row)) for row in body]


def test_the_new_chain_is_the_examples() -> None:
    """Line by line and in order; the example has more lines."""
    block = (ROOT / "README.md").read_text().partition("<!-- new-chain -->\n```python\n")[2].partition("```")[0]
    lines = [line.strip() for line in block.splitlines() if line.strip()]
    example = map(str.strip, (ROOT / "examples/new_chain.py").read_text().splitlines())
    assert lines and all(line in example for line in lines)


def test_the_options() -> None:
    shown = table("| option | variable")
    assert {row["option"] for row in shown} == {f"fxfuse.{field.name}" for field in fields(Options)}
    assert all(row["variable"] == row["option"].upper().replace(".", "_") for row in shown)


def test_headline_times_and_errors() -> None:
    measured = {
        (r["workload"], r["dtype"], r["precision"], r["contender"]): r for r in rows_of("headline_h200.json") if r["layout"] == "contiguous"
    }
    shown = table("| chain | dtype | eager")
    for row in shown:
        dtype, _, precision = row["dtype"].partition(", ")
        found = {name: measured[row["chain"], dtype, precision, contender] for name, contender in COLUMNS.items()}
        assert {name: row[name] for name in COLUMNS} == {name: f"{r['gpu_ms']:.2f}" for name, r in found.items()}
        assert (row["eager's error"], row["error"]) == (f"{found['eager']['error']:.0e}", f"{found['fxfuse']['error']:.0e}")
    assert len(shown) == 8


def test_training_times_and_memory() -> None:
    rows = [row for row in rows_of("training_h200.json") if row["layout"] == "contiguous"]
    measured = {(r["chain"], r["dtype"], r["precision"], r["contender"]): r for r in rows}
    shown = table("| chain | dtype | eager, ms")
    for row in shown:
        dtype, _, precision = row["dtype"].partition(", ")
        for name in ("eager", "inductor", "fxfuse"):
            assert row[f"{name}, ms"] == f"{measured[row['chain'], dtype, precision, name]['gpu_ms']:.2f}"
        for name in ("inductor", "fxfuse"):
            assert row[f"{name}, MB"] == f"{measured[row['chain'], dtype, precision, name]['peak_mb']:.0f}"
    assert len(shown) == 8


def test_wall_times_of_short_training_steps() -> None:
    steps: dict[tuple[str, ...], dict[str, dict[str, Any]]] = {}
    for row in rows_of("training_sweep_h200.json"):
        steps.setdefault((row["workload"], row["dtype"], row["precision"], row["layout"]), {})[row["contender"]] = row
    compiled = [step for step in steps.values() if step["inductor"]["failed"] is None]
    short = [step for step in compiled if step["inductor"]["gpu_ms"] < 0.6]
    save, recompute = (median(step[f"fxfuse {way}"]["wall_ms"] / step["inductor"]["wall_ms"] for step in short) for way in ("save", "recompute"))
    text = (ROOT / "README.md").read_text()
    assert f"{save:.2f} (`save`) and {recompute:.2f} (`recompute`) times Inductor's" in text
    assert f"the {len(compiled)} shapes of `training_sweep_h200.json` that Inductor compiles" in text


DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def check_columns(header: str, name: str, measured: dict[tuple[str, str, str], str]) -> None:
    """A table with a column for each dtype and layout shows what was measured, for both chains."""
    shown = table(header)
    for row in shown:
        for column, text in row.items():
            if column != name:
                dtype, _, layout = column.partition(" ")
                assert text == measured[row[name], DTYPES[dtype], layout or "contiguous"]
    assert len(shown) == 2


def test_tails_share_of_a_copy() -> None:
    check_columns("| op | fp32", "op", {(r["op"], r["dtype"], r["layout"]): f"{r['share']:.0%}" for r in rows_of("tails_h200.json")})


def test_cpu_times_over_inductors() -> None:
    rows = [r for r in rows_of("headline_cpu.json") if r["contender"] == "fxfuse"]
    check_columns("| chain | fp32", "chain", {(r["workload"], r["dtype"], r["layout"]): f"{r['over_inductor'][1]:.2f}" for r in rows})


def test_memory_beside_inputs_and_result() -> None:
    most = float(re.search(r"a call holds ([\d.]+) MB at most", (ROOT / "README.md").read_text())[1])
    assert max(r["peak_mb"] - r["output_mb"] for r in rows_of("headline_h200.json") if r["contender"] == "fxfuse") <= most


def test_inductors_max_autotune() -> None:
    rows = [r for r in rows_of("autotune_h200.json") if r["contender"] == "inductor-max-autotune channels_last"]
    text = " ".join((ROOT / "README.md").read_text().split())
    ms = {(r["workload"], r["dtype"], r["precision"]): f"{r['gpu_ms']:.2f}" for r in rows}
    kinds = (("float32", "tf32"), ("float32", "ieee"), ("bfloat16", ""), ("float16", ""))
    first, second = ([ms[(chain, *kind)] for kind in kinds] for chain in ("conv_norm_pool_gelu", "conv_gelu_pool"))
    assert f"{', '.join(first)} on the first model and {', '.join(second)} on the second (tf32, ieee, bf16, fp16)" in text


def test_autos_choices() -> None:
    workloads: dict[tuple[str, ...], dict[str, float]] = {}
    slower, noise = 0, 0.0
    for r in rows_of("sweep_h200.json"):
        workloads.setdefault((r["workload"], r["dtype"], r["precision"], r["layout"]), {})[r["contender"]] = r["gpu_ms"]
        if r["contender"] != "fxfuse":
            continue
        if r["op"] == "inductor":  # the same code twice
            noise = max(noise, abs(r["over_inductor"][1] - 1))
        else:
            slower += r["over_inductor"][0] > 1.02
    close = sum(ms["fxfuse"] <= 1.02 * min(ms["inductor"], ms["fxfuse tail"]) for ms in workloads.values())
    mean = math.exp(sum(math.log(ms["fxfuse"] / ms["inductor"]) for ms in workloads.values()) / len(workloads))
    text = " ".join((ROOT / "README.md").read_text().split())
    assert f"sweep of {len(workloads)} workloads" in text and not slower
    assert f"where it leaves the chain to Inductor it differs by {noise:.0%} at most" in text
    assert f"Inductor and the tail on {close}, and takes {mean:.2f} times as long" in text
