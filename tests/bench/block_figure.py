"""The figure of a comparison in blocks (block_page.py): what compute buys, and why."""

import io
from collections.abc import Mapping, Sequence
from typing import Any

import matplotlib as mpl
import numpy as np
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tasks.report.views.plots import style_of
from tests.bench.block_lines import START, Run
from tests.bench.block_page import (
    SHARED,
    Comparison,
    Line,
    accuracy,
    compared,
    compute,
    interval,
)

SIZE = (10.0, 3.8)  # inches
ACCOUNTS = {
    "executed": "executed compute, TFLOPs",
    "charged_paper": "compute as sGPO's paper counts, TFLOPs",
}
MARKS = "osD^vP*X"


def figure(plan: Mapping[str, Any], runs: Sequence[Run], lines: Sequence[Line]) -> Figure:
    """Return panels of the gain over the initial policy against compute, with Student's 95 %
    interval over blocks, and of the share of mixed groups by quarter. A run that reads the profile
    has a second, hollow mark: its profile divided among several runs. Cells that are not in every
    block with a run of the reference are left out."""
    found = compared(plan, runs, lines)
    shown: dict[str, list[str]] = {}
    for recipe, length in found.shown():
        shown.setdefault(recipe, []).append(length)
    drawn = Figure(SIZE, layout="constrained")
    *panels, last = drawn.subplots(1, len(ACCOUNTS) + 1)
    for axes, (account, words) in zip(panels, ACCOUNTS.items(), strict=True):
        for place, (recipe, lengths) in enumerate(shown.items()):
            draw_gain(axes, found, recipe, lengths, account, place)
        axes.set(xlabel=words, ylabel="test accuracy over the initial policy, points")
        axes.set(xlim=(0.0, None), ylim=(min(0.0, axes.get_ylim()[0]), None))
    for place, (recipe, lengths) in enumerate(shown.items()):
        each = [line["mixed"] for line in found.cells[recipe, lengths[-1]].values()]
        shares = 100 * np.mean(each, axis=0)
        last.plot(range(1, len(shares) + 1), shares, marker=mark(place), color=f"C{place}")
    last.set(xlabel="quarter of the steps", ylabel="mixed groups, %", ylim=(0.0, None))
    last.set_xticks(range(1, 5))
    for axes in (*panels, last):
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    handles = panels[0].get_legend_handles_labels()
    drawn.legend(*handles, frameon=False, loc="outside upper center", ncols=len(shown))
    return drawn


def draw_gain(
    axes: Axes, found: Comparison, recipe: str, lengths: Sequence[str], account: str, place: int
) -> None:
    """Draw a recipe's runs by their cost."""
    start, costs, gains, shared = found.cells[START, ""], list[float](), [], list[float]()
    for length in lengths:
        cells = found.cells[recipe, length]
        own = [accuracy(line) - accuracy(start[block]) for block, line in cells.items()]
        gains.append([100 * value for value in interval(np.array(own))])
        for paid, into in ((1.0, costs), (1 / SHARED, shared)):
            into.append(float(np.mean([compute(x, account, paid) for x in cells.values()])) / 1e12)
    means, lows, highs = np.array(gains).T
    style = {"color": f"C{place}", "marker": mark(place)}
    axes.errorbar(costs, means, [means - lows, highs - means], label=recipe, **style)  # type: ignore[arg-type]
    if shared != costs:
        axes.plot(shared, means, fillstyle="none", linestyle="", **style)  # type: ignore[arg-type]


def mark(place: int) -> str:
    return MARKS[place % len(MARKS)]


def svg(
    plan: Mapping[str, Any], runs: Sequence[Run], lines: Sequence[Line], theme: Mapping[str, str]
) -> bytes:
    """Return the figure, the same bytes for the same lines."""
    written = io.BytesIO()
    colours = [theme[f"c{place}"] for place in range(len(MARKS))]
    with mpl.rc_context(style_of(theme) | {"axes.prop_cycle": cycler(color=colours)}):
        metadata = dict.fromkeys(("Date", "Creator"))
        figure(plan, runs, lines).savefig(written, format="svg", metadata=metadata)
    return written.getvalue()
