"""The plots that `dvc plots` shows side by side: validation accuracy over each account of compute,
as SVG files that need no script and no network."""

import io
from typing import Any

import matplotlib as mpl
import polars as pl
from matplotlib.figure import Figure

from tasks.report.curves import AXES, COMPARED
from tasks.report.evidence import Evidence
from tasks.report.figures import axis_unit, axis_words, colours
from tasks.report.leaderboard import Fits

SIZE = (7.0, 4.2)  # inches
# the same file for the same numbers, and letters that a browser draws in its own font
STYLE: Any = {"svg.hashsalt": "winnow", "svg.fonttype": "none", "font.size": 9.0}


def plots(evidence: Evidence, curves: pl.DataFrame, fits: Fits) -> dict[str, str]:
    """Return the figure of each account by the account's name."""
    with mpl.rc_context(STYLE):
        return {account: accuracy_svg(evidence, curves, fits, account) for account in COMPARED}


def accuracy_svg(evidence: Evidence, curves: pl.DataFrame, fits: Fits, account: str) -> str:
    """Return validation accuracy over one account: a fitted line per recipe with its band, and a
    dot per validation of each seed."""
    column = AXES[account]
    size, name = axis_unit(account, float(curves[column].max() or 0.0))  # type: ignore[arg-type]
    figure = Figure(SIZE, layout="constrained")
    axes = figure.subplots()
    for recipe, index in colours(evidence).items():
        fitted, colour = fits[recipe][account], f"C{index}"
        xs = fitted.curve.flops / size
        axes.plot(xs, fitted.curve.accuracy, color=colour, label=recipe)
        axes.fill_between(xs, *fitted.band(), color=colour, alpha=0.15, linewidth=0.0)
        part = curves.filter(pl.col("recipe") == recipe)
        axes.plot((part[column] / size).to_numpy(), part["accuracy"].to_numpy(), ".", color=colour)
    axes.set_xlim(left=0.0)
    axes.set_xlabel(axis_words(account, name))
    axes.set_ylabel("validation accuracy")
    axes.yaxis.set_major_formatter("{x:.0%}")
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    written = io.StringIO()
    # without the document type and the metadata, which name addresses
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    figure.savefig(written, format="svg", metadata=nothing)
    return written.getvalue()[written.getvalue().index("<svg") :]
