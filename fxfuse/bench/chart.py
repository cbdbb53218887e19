"""A run's chart, from the rows of its JSON file. Needs matplotlib.

    python -m fxfuse.bench.chart result.json chart.svg
"""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import BenchError
from .results import groups

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COLOURS = {"eager": "#b8b8b8", "best inductor": "#7a9cc6", "fxfuse": "#d1495b"}
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


def _models(rows: list[dict[str, Any]], plt: Any) -> Any:
    """A panel for each model: a group of bars for each dtype and layout, a bar each for eager, the best Inductor and fxfuse."""
    models = list(dict.fromkeys(row["workload"] for row in rows))
    figure, axes = plt.subplots(1, max(len(models), 1), figsize=(6.5 * max(len(models), 1), 4), constrained_layout=True, squeeze=False)
    for axis, model in zip(axes[0], models):
        _bars(axis, list(groups([row for row in rows if row["workload"] == model]).values()))
        axis.set_title(TITLES.get(model, model), fontsize=10)
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=len(COLOURS), frameon=False)
    return figure


def _bars(axis: Axes, members: list[list[dict[str, Any]]]) -> None:
    for index, (name, colour) in enumerate(COLOURS.items()):
        found = [(group, value) for group, rows in enumerate(members) if (value := _bar(rows, name)) is not None]
        bars = axis.bar([group + 0.27 * (index - 1) for group, _ in found], [value for _, value in found], 0.27, color=colour, label=name)
        axis.bar_label(bars, fmt="%.2f", fontsize=7, padding=1)
    labels = ["\n".join(filter(None, (rows[0]["dtype"], rows[0]["precision"], rows[0]["layout"]))) for rows in members]
    axis.set_xticks(range(len(members)), labels, fontsize=6)
    on_gpu = any(row["gpu_ms"] is not None for rows in members for row in rows)
    axis.set_ylabel(f"{'GPU' if on_gpu else 'wall'} ms a call (log scale)")
    axis.set_yscale("log")
    axis.spines[["top", "right"]].set_visible(False)


def _bar(rows: list[dict[str, Any]], name: str) -> float | None:
    """A bar's milliseconds; None where none of its contenders has a time. In channels_last, inductor's are among the best of Inductor."""
    of_bar = [row for row in rows if (row["contender"].startswith("inductor") if name == "best inductor" else row["contender"] == name)]
    return min((row["gpu_ms"] or row["wall_ms"] for row in of_bar if row["wall_ms"]), default=None)


def _sweep(rows: list[dict[str, Any]], plt: Any) -> Any:
    """auto's time over the faster of Inductor and the tail op, a point for each shape with its quartiles, in order."""
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
    axis.set_ylabel("auto / best of inductor and tail (log scale)")
    axis.spines[["top", "right"]].set_visible(False)
    if judged:
        axis.legend(frameon=False)
    return figure


if __name__ == "__main__":
    draw(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
