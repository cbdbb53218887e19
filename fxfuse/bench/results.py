"""The JSON file of a run: what was measured, on what and with what, and the rows (`row.Row`, or those of `tails.measure`)."""

from __future__ import annotations

import datetime
import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from ..environment import device_name, versions
from . import BenchError

SCHEMA = 1
# What decides the figures; a result file that is committed beside them does not.
SOURCES = ("fxfuse", "passes", "csrc")
# What must be the same for rows of an earlier run to stand beside new ones.
SAME = ("schema", "suite", "device", "torch", "cuda", "python", "fxfuse", "commit", "rounds", "training", "input_gradient")


def header(
    suite: str, device: torch.device, rounds: int, command: str, training: bool = False, input_gradient: bool = False
) -> dict[str, Any]:
    """A result without rows. training: whether of training steps. complete: whether every workload was measured."""
    return {
        "schema": SCHEMA,
        "suite": suite,
        "training": training,
        "input_gradient": input_gradient,
        "device": device_name(device),
        **versions(),
        "commit": commit(Path(__file__).parents[2]),
        "command": command,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "rounds": rounds,
        "complete": False,
        "ceilings": None,
        "rows": [],
    }


def commit(checkout: Path) -> str | None:
    """The commit that is checked out, with "-dirty" behind it where its sources differ; None where fxfuse does not run from a checkout."""
    if not (checkout / ".git").exists():
        return None
    git = ["git", "-C", str(checkout)]
    try:
        head = subprocess.run([*git, "rev-parse", "HEAD"], capture_output=True, encoding="utf-8", check=True).stdout.strip()
        same = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", *SOURCES], capture_output=True).returncode == 0
    except (OSError, subprocess.CalledProcessError):
        return None
    return head if same else f"{head}-dirty"


def resume(result: dict[str, Any], path: Path, contenders: Sequence[str]) -> set[str]:
    """Takes the rows and ceilings of an earlier run's file over, if there is one; the names of the workloads that are done.

    Raises BenchError if the file is of another suite, device or version, or lacks contenders.
    """
    if not path.exists():
        return set()
    try:
        earlier = json.loads(path.read_text(encoding="utf-8"))
        different = [key for key in SAME if earlier[key] != result[key]]
        rows, ceilings = earlier["rows"], earlier["ceilings"]
    except (ValueError, KeyError, TypeError) as error:
        raise BenchError(f"{path} is no result of fxfuse bench that could be resumed ({type(error).__name__}: {error})") from error
    if different:
        key = different[0]
        raise BenchError(f"{path} cannot be resumed: its {key} is {earlier[key]!r}, now it is {result[key]!r}")
    measured = {row["contender"] for row in rows if "contender" in row}
    if missing := [name for name in contenders if measured and name not in measured]:
        raise BenchError(f"{path} cannot be resumed: {', '.join(missing)} was not measured in it; give --contenders as then, or another file")
    result["rows"], result["ceilings"] = rows, ceilings
    return {name_of(row) for row in rows}


def name_of(row: dict[str, Any]) -> str:
    """The name of the workload that a row belongs to, as workloads have it."""
    return " ".join(filter(None, (row.get("workload") or row["op"], row["dtype"], row.get("precision"), row["layout"])))


def groups(rows: Sequence[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """The rows by workload, in their order."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        found.setdefault(name_of(row), []).append(row)
    return found


def rivals(rows: Sequence[dict[str, Any]]) -> str:
    """What `auto` was held against."""
    return "the faster of inductor and tail" if any(row["contender"] == "fxfuse tail" for row in rows) else "inductor"
