"""A run's chart, from the rows of its JSON file. Needs matplotlib.

    python -m fxfuse.bench.chart result.json chart.svg
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import BenchError
from .results import groups, rivals

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Rows = Sequence[dict[str, Any]]
# A bar's height, from its row.
Value = Callable[[dict[str, Any]], float | None]
COLOURS = {"eager": "#b8b8b8", "best inductor": "#7a9cc6", "fxfuse": "#d1495b"}
TRAINING_COLOURS = {**COLOURS, "fxfuse recompute": "#edae49", "fxfuse save": "#66a182"}
TITLES = {"conv_norm_pool_gelu": "conv → add → layer_norm → avg_pool3d → gelu", "conv_gelu_pool": "conv → gelu → adaptive_avg_pool"}
SUFFIXES = (".svg", ".png")


def check(target: Path, suite: str) -> None:
    """Raises BenchError if this run's chart cannot be drawn into the file."""
    if suite == "tails":
        raise BenchError("there is no chart of tails; leave --chart out")
    if target.suffix not in SUFFIXES:
        raise BenchError(f"--chart {target} must end in {' or '.join(SUFFIXES)}")
    if importlib.util.find_spec("matplotlib") is None:
        raise BenchError("--chart needs matplotlib, which is not installed; run: pip install 'fxfuse[chart]'")


def draw(result: dict[str, Any], target: Path) -> None:
    """Draws a result: times of models as bars, or the sweep's ratios in order. The same file for the same figures."""
    import matplotlib

    matplotlib.use("agg")
    import matplotlib.pyplot as plt

    with matplotlib.rc_context({"svg.hashsalt": "fxfuse"}):
        figure = (_sweep if result["suite"] == "sweep" else _models)(result["rows"], plt)
        figure.suptitle(f"{result['device']}, torch {result['torch']}", fontsize=9)
        figure.savefig(target, metadata={"Date": None} if target.suffix == ".svg" else {})
        plt.close(figure)


def _models(rows: Rows, plt: Any) -> Any:
    """A panel for each model: a group of bars for each dtype and layout, a bar each for eager, the best Inductor and fxfuse, as far as they were
    measured. Of training steps with fxfuse's ways of the backward, and below it a panel of peak memory."""
    models = list(dict.fromkeys(row["workload"] for row in rows))
    training = any(row.get("training") for row in rows)
    every = TRAINING_COLOURS if training else COLOURS
    colours = {name: colour for name, colour in every.items() if _bar(rows, name, _milliseconds) is not None} or every
    lines = [_milliseconds, _megabytes] if training and any(map(_megabytes, rows)) else [_milliseconds]
    size = (6.5 * max(len(models), 1), 4 * len(lines))
    figure, axes = plt.subplots(len(lines), max(len(models), 1), figsize=size, constrained_layout=True, squeeze=False)
    for (line, value), (column, model) in itertools.product(enumerate(lines), enumerate(models)):
        axis = axes[line][column]
        _bars(axis, list(groups([row for row in rows if row["workload"] == model]).values()), colours, value)
        axis.set_title(TITLES.get(model, model), fontsize=10)
        axis.set_ylabel(_label(rows, value))
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=len(colours), frameon=False)
    return figure


def _bars(axis: Axes, members: list[Rows], colours: dict[str, str], value: Value) -> None:
    width = 0.81 / len(colours)
    for index, (name, colour) in enumerate(colours.items()):
        found = [(group, height) for group, rows in enumerate(members) if (height := _bar(rows, name, value)) is not None]
        places = [group + width * (index - (len(colours) - 1) / 2) for group, _ in found]
        bars = axis.bar(places, [height for _, height in found], width, color=colour, label=name)
        form, rotation = "%.2f" if value is _milliseconds else "%.0f", 90 if len(colours) > 3 else 0
        axis.bar_label(bars, fmt=form, fontsize=7, padding=2 if rotation else 1, rotation=rotation)
    labels = ["\n".join(filter(None, (rows[0]["dtype"], rows[0]["precision"], rows[0]["layout"]))) for rows in members]
    axis.set_xticks(range(len(members)), labels, fontsize=6)
    axis.set_yscale("log")
    axis.margins(y=0.12 if len(colours) > 3 else None)
    axis.spines[["top", "right"]].set_visible(False)


def _bar(rows: Rows, name: str, value: Value) -> float | None:
    """A bar's height; None where none of its contenders has one. In channels_last, inductor's are among the best of Inductor."""
    of_bar = [row for row in rows if (row["contender"].startswith("inductor") if name == "best inductor" else row["contender"] == name)]
    return min(filter(None, map(value, of_bar)), default=None)


def _milliseconds(row: dict[str, Any]) -> float | None:
    return row["gpu_ms"] or row["wall_ms"]


def _megabytes(row: dict[str, Any]) -> float | None:
    return row["peak_mb"]


def _label(rows: Rows, value: Value) -> str:
    unit = "a training step" if any(row.get("training") for row in rows) else "a call"
    if value is _megabytes:
        return f"peak MB of {unit} (log scale)"
    return f"{'GPU' if any(row['gpu_ms'] is not None for row in rows) else 'wall'} ms {unit} (log scale)"


def _sweep(rows: Rows, plt: Any) -> Any:
    """auto's time over that of its rivals' faster one, a point for each shape with its quartiles, in order."""
    judged = sorted((row for row in rows if row["auto"]), key=lambda row: row["auto"]["over_rival"][1])
    figure, axis = plt.subplots(figsize=(9, 4), constrained_layout=True)
    for chain, colour in zip(TITLES, ("#d1495b", "#2e6f95")):
        points = [(place, row["auto"]["over_rival"]) for place, row in enumerate(judged) if row["chain"] == chain]
        if points:
            middle = [over[1] for _, over in points]
            spread = [[over[1] - over[0] for _, over in points], [over[2] - over[1] for _, over in points]]
            axis.errorbar([place for place, _ in points], middle, spread, fmt=".", color=colour, elinewidth=0.8, label=chain)
    axis.axhline(1, color="#808080", linewidth=0.8)
    axis.set_yscale("log")
    axis.set_xlabel("shapes of the sweep, in order")
    axis.set_ylabel(f"auto / {rivals(rows)} (log scale)")
    axis.spines[["top", "right"]].set_visible(False)
    if judged:
        axis.legend(frameon=False)
    return figure


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), Path(sys.argv[2]))
