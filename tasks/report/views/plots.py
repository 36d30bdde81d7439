"""The plots that `dvc plots` shows side by side: validation accuracy against compute in each
account, test accuracy, and the groups that the reference sampled. They are SVG files without
scripts or network requests; one also has a dark version. An arrow in the budget account's plot
shows how much less compute a recipe needed for the reference's final accuracy, as in the report's
first sentence."""

import io
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib as mpl
import polars as pl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from tasks.report.curves import AXES, axis_unit, axis_words
from tasks.report.headline import compared, compute_ratio
from tasks.report.results import Results, axis_of
from tasks.report.views.charts import NUM_COLOURS

SIZE = (8.4, 4.2)  # inches
DARK = "executed"  # the account of the README's figure
PAGE = (Path(__file__).parent / "page.html").read_text()
# colours of the report's page by name: light, dark
THEMES = [
    dict(re.findall(r"--([\w-]+): (#[0-9a-f]{6});", part))
    for part in PAGE.split("prefers-color-scheme")
]


def plots(results: Results) -> dict[str, str]:
    """Return all figures as SVG, keyed by file name."""
    light, dark = THEMES
    found = {name: figure_svg(results, name, light) for name in results.evidence.accounts}
    return found | {f"{name}-dark": figure_svg(results, name, dark) for name in {DARK} & {*found}}


def figure_svg(results: Results, account: str, theme: Mapping[str, str]) -> str:
    """Return a figure as SVG: accuracy against one account, on test by recipe, and a bar of the
    reference's groups."""
    with mpl.rc_context(style_of(theme)):
        figure = Figure(SIZE, layout="constrained")
        left, middle, right = figure.subplots(1, 3, width_ratios=(5, 2, 1))
        draw_accuracy(left, results, account, theme)
        if account == axis_of(results.evidence):
            draw_arrow(left, results, account, theme["ink"])
        draw_tested(middle, results, theme)
        draw_groups(right, results, theme)
        written = io.StringIO()
        # without the document type and the metadata, which contain addresses
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        figure.savefig(written, format="svg", metadata=nothing)
    return written.getvalue()[written.getvalue().index("<svg") :]


def style_of(theme: Mapping[str, str]) -> Any:
    """Return matplotlib's settings for a theme: deterministic output, and text that a browser draws
    in its own font."""
    ink = ("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color")
    paper = ("figure.facecolor", "axes.facecolor")
    style: Any = {"svg.hashsalt": "winnow", "svg.fonttype": "none", "font.size": 9.0}
    style |= dict.fromkeys(ink, theme["ink"]) | dict.fromkeys(paper, theme["paper"])
    return style | {"grid.color": theme["line"]}


def drawn(results: Results) -> list[str]:
    """Return the recipes of the figure, at most one for each colour: the reference, the recipe that
    the first sentence compares with it, and the best of the others by validation."""
    summary = results.summary
    first = [summary["reference"], compared(summary)]
    best = sorted(
        results.colours, key=lambda recipe: -summary["recipes"][recipe]["validation"]["mean"]
    )
    first_ones = list(dict.fromkeys(recipe for recipe in [*first, *best] if recipe))[:NUM_COLOURS]
    return [recipe for recipe in results.colours if recipe in first_ones]


def draw_accuracy(axes: Axes, results: Results, account: str, theme: Mapping[str, str]) -> None:
    """Draw a fitted line per recipe with its band, and a dot per validation of each seed."""
    column, curves = AXES[account], results.curves
    size, name = axis_unit(account, float(curves[column].max() or 0.0))  # type: ignore[arg-type]
    shown, num = drawn(results), len(results.colours)
    for index, recipe in enumerate(shown):
        fitted, colour = results.fits[recipe][account], theme[f"c{index}"]
        xs = fitted.curve.flops / size
        axes.plot(xs, fitted.curve.accuracy, color=colour, label=recipe)
        axes.fill_between(xs, *fitted.band(), color=colour, alpha=0.15, linewidth=0.0)
        part = curves.filter(pl.col("recipe") == recipe)
        axes.plot((part[column] / size).to_numpy(), part["accuracy"].to_numpy(), ".", color=colour)
    axes.set_xlim(left=0.0)
    axes.set_xlabel(axis_words(account, name))
    axes.set_ylabel("validation accuracy")
    if num > len(shown):
        axes.set_title(f"the best {len(shown)} of {num} recipes by validation", fontsize=9.0)
    axes.yaxis.set_major_formatter("{x:.0%}")
    axes.grid()
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)


def draw_arrow(axes: Axes, results: Results, account: str, ink: str) -> None:
    """Draw an arrow from the end of the reference to the point where the compared recipe reached
    the same accuracy, if it needed less compute."""
    summary = results.summary
    times, recipe = compute_ratio(summary), compared(summary)
    if times is None or recipe is None:
        return
    target = summary["points"][summary["reference"]][-1]["accuracy"]
    most = float(results.curves[AXES[account]].max() or 0.0)  # type: ignore[arg-type]
    size, _ = axis_unit(account, most)
    needed = results.fits[recipe][account].curve.reaches(target) / size
    arrow = {"arrowstyle": "->", "color": ink, "shrinkA": 0, "shrinkB": 0}
    axes.annotate("", (needed, target), (needed * times, target), arrowprops=arrow)
    place: Any = {"xytext": (0, 4), "textcoords": "offset points", "horizontalalignment": "center"}
    axes.annotate(f"compute / {times:.1f}", (needed * (1 + times) / 2, target), **place)


def draw_tested(axes: Axes, results: Results, theme: Mapping[str, str]) -> None:
    """Draw test pass@1 with its 95 % interval, the initial policy's first."""
    for place, name in enumerate(["initial", *drawn(results)]):
        mean, low, high = results.tested[name].values()
        hue = theme[f"c{place - 1}" if place else "initial"]
        axes.errorbar(name, mean, [[mean - low], [high - mean]], color=hue, marker="o")
    axes.set_title("test pass@1", fontsize=9.0, loc="left")
    axes.yaxis.set_major_formatter("{x:.0%}")
    axes.tick_params(axis="x", rotation=45)
    axes.grid(axis="y")
    axes.spines[["top", "right"]].set_visible(False)


def draw_groups(axes: Axes, results: Results, theme: Mapping[str, str]) -> None:
    """Draw the groups of the reference's seeds as shares of a bar: all wrong, mixed, all right."""
    recipe = results.summary["reference"]
    groups = pl.concat(results.groups[run.name] for run in results.evidence.seeds(recipe))
    own = f"c{drawn(results).index(recipe)}"
    parts = {"all wrong": "left-out", "mixed": own, "all right": "initial"}
    masks = (groups["success"] == 0, groups["mixed"], groups["success"] == 1)
    bottom = 0.0
    for (words, colour), one in zip(parts.items(), masks, strict=True):
        share = int(one.sum()) / max(1, len(groups))
        axes.bar(0.0, share, 0.6, bottom, color=theme[colour])
        axes.text(0.4, bottom + share / 2, f"{words}\n{share:.0%}", verticalalignment="center")
        bottom += share
    axes.set_xlim(-0.4, 1.2)
    axes.set_title(f"groups of {recipe}", fontsize=9.0, loc="left")
    axes.set_axis_off()
