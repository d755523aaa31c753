"""Draws charts of bars: `draw.py FOLDER` in an environment with matplotlib, with the numbers as JSON on stdin."""

# matplotlib is not in the environment of the type checker.
# mypy: ignore-errors
import json
import statistics
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

COLOURS = [
    *("#1b6ca8", "#9aa5b1", "#e07a1f", "#6a9c2f", "#a23b72", "#7d5ba6", "#c0392b", "#2a9d8f", "#8d6e63", "#444444"),
    *("#c9a227", "#5f6caf"),
]
# So many times the median, and one bar leaves nothing to see of most others.
_HIDES = 20
_FIT_IN_A_LINE = 80


def draw(chart, folder):
    figure, axes = pyplot.subplots(figsize=(9.5, 3.6), dpi=110)
    width = 0.8 / len(chart["series"])
    for index, series in enumerate(chart["series"]):
        for group, bar in enumerate(series["bars"]):
            if bar is not None:
                middle, low, high = bar
                at = group + (index - (len(chart["series"]) - 1) / 2) * width
                label = series["name"] if group == next(i for i, each in enumerate(series["bars"]) if each) else None
                axes.bar(at, middle, width * 0.92, color=COLOURS[series["colour"] % len(COLOURS)], label=label)
                axes.errorbar(at, middle, [[middle - low], [high - middle]], color="#333333", linewidth=1, capsize=2)
    axes.set_xticks(range(len(chart["cases"])), chart["cases"])
    if len("".join(chart["cases"])) > _FIT_IN_A_LINE:
        axes.tick_params(axis="x", labelrotation=90, labelsize=7)
    title = chart["title"]
    bars = [middle for series in chart["series"] for middle, _, _ in filter(None, series["bars"])]
    if max(bars) > _HIDES * statistics.median(bars):
        axes.set_yscale("log")
        title += ", logarithmic"
    axes.set_title(title, fontsize=10)
    axes.grid(axis="y", linewidth=0.4)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(fontsize=7, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    figure.tight_layout()
    figure.savefig(folder / f"{chart['file']}.png", metadata={"Software": None})
    pyplot.close(figure)


for chart in json.load(sys.stdin):
    draw(chart, Path(sys.argv[1]))
