"""A figure for each family: accuracy against compute, one line per recipe."""

from collections.abc import Mapping
from pathlib import Path

import matplotlib as mpl
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, PercentFormatter

from flows.benchmark.headline import Runs
from tasks.common.files import replace_file

# the x axes: unit and name
PANELS = {
    "charged": (1e12, "charged, TFLOPs"),
    "charged_mixed": (1e12, "charged_mixed, TFLOPs"),
    "device_seconds": (1.0, "modelled seconds"),
}
MARKS = "osD^vP*X"
FEW = 10
"""The most recipes for which the legend is inside a panel; otherwise it is beside the panels."""


def write_figure(path: Path, runs: Mapping[str, Runs]) -> None:
    """Write the figure as SVG, with the same bytes for the same runs. A point is the mean over
    seeds, an error bar their range; compute is on a logarithmic axis."""
    with mpl.rc_context({"svg.hashsalt": "winnow", "svg.fonttype": "none", "font.size": 9}):
        size = (11, 3.6) if len(runs) <= FEW else (14, 5)
        figure = Figure(figsize=size, layout="constrained")
        panels = figure.subplots(1, len(PANELS), sharey=True)
        for panel, (measure, (unit, words)) in zip(panels, PANELS.items(), strict=True):
            for place, (name, mine) in enumerate(runs.items()):
                frontier = [mine.points[number] for number in mine.frontier[measure]]
                frontier.sort(key=lambda point: point.cost(measure))
                tests = np.array([point.tests for point in frontier])
                means = tests.mean(axis=1)
                panel.errorbar(
                    [point.cost(measure) / unit for point in frontier],
                    means,
                    [means - tests.min(axis=1), tests.max(axis=1) - means],
                    label=name,
                    marker=MARKS[place % len(MARKS)],
                    color=f"C{place}",
                    linewidth=1.2,
                    markersize=4,
                    capsize=2,
                )
            panel.set_xscale("log")
            panel.xaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
            panel.xaxis.set_major_formatter("{x:g}")
            panel.xaxis.set_minor_formatter(NullFormatter())
            panel.set_xlabel(words)
            panel.grid(alpha=0.3)
        panels[0].set_ylabel("pass@1 on test")
        panels[0].yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        if len(runs) <= FEW:
            panels[-1].legend(fontsize=8)
        else:
            handles, names = panels[-1].get_legend_handles_labels()
            columns = -(-len(names) // 16)
            figure.legend(handles, names, loc="outside right center", fontsize=8, ncols=columns)
        metadata = {"Date": None, "Creator": None}
        replace_file(path, lambda stream: figure.savefig(stream, format="svg", metadata=metadata))
