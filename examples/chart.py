"""The README's chart, from a result file of `headline.py`. Needs matplotlib.

    python examples/chart.py examples/results/headline_h200.json examples/results/headline_h200.svg
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("svg")
import matplotlib.pyplot as plt

CONTENDERS = {"eager": "#b8b8b8", "inductor": "#7a9cc6", "auto": "#d1495b"}
TITLES = {"conv_norm_pool_gelu": "conv → add → layer_norm → avg_pool3d → gelu", "conv_gelu_pool": "conv → gelu → adaptive_avg_pool"}


def main(source: Path, target: Path) -> None:
    """Draws GPU milliseconds of both headline models: a group of bars for each dtype and layout, a bar for each contender."""
    matplotlib.rcParams["svg.hashsalt"] = "fxfuse"  # the same file for the same figures
    result = json.loads(source.read_text())
    figure, axes = plt.subplots(1, len(TITLES), figsize=(13, 4), constrained_layout=True)
    for axis, (chain, title) in zip(axes, TITLES.items()):
        rows = [row for row in result["models"] if row["chain"] == chain]
        for index, (name, colour) in enumerate(CONTENDERS.items()):
            places = [group + 0.27 * (index - 1) for group in range(len(rows))]
            label = "fxfuse" if name == "auto" else name
            bars = axis.bar(places, [row["ms"][name] for row in rows], 0.27, color=colour, label=label)
            axis.bar_label(bars, fmt="%.2f", fontsize=7, padding=1)
        axis.set_xticks(range(len(rows)), [f"{row['dtype']}\n{row['precision']}\n{row['layout']}" for row in rows], fontsize=6)
        axis.set_title(title, fontsize=10)
        axis.set_ylabel("GPU ms a call (log scale)")
        axis.set_yscale("log")
        axis.spines[["top", "right"]].set_visible(False)
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(CONTENDERS), frameon=False)
    figure.suptitle(f"{result['device']}, torch {result['torch']}", fontsize=9)
    figure.savefig(target, metadata={"Date": None})


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
