"""The transition matrix: how many test prompts had which pass rate before training, and which
after."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from tasks.report.charts import Chart, chart, colour, variant
from tasks.report.paired import INITIAL, Paired

# classes of pass rates: none right, three between, all right
CLASSES = ("0", "to 1/3", "to 2/3", "below 1", "1")


def class_of(rates: pl.Series) -> npt.NDArray[np.int64]:
    """Return the places of pass rates in CLASSES."""
    # the upper ends of the classes, each of them inside
    return np.searchsorted([0.0, 1 / 3, 2 / 3, 1.0 - 1e-9], rates.to_numpy() - 1e-12)


def matrix(paired: Paired, runs: Sequence[str]) -> list[list[float]]:
    """Return how many prompts moved from each class (rows) to each (columns), the mean over the
    runs. Prompts that could not be graded are left out."""
    counts = np.zeros((len(CLASSES), len(CLASSES)))
    for run in runs:
        graded = paired.rates.select(INITIAL, run).drop_nulls()
        np.add.at(counts, (class_of(graded[INITIAL]), class_of(graded[run])), 1.0)
    return [list(map(float, row)) for row in counts / len(runs)]


def transitions(
    paired: Paired, runs: Mapping[str, Sequence[str]], colours: Mapping[str, int]
) -> Chart:
    """Return the matrix of each recipe, over its seeds."""
    variants = {}
    for recipe, names in runs.items():
        trace: dict[str, Any] = {
            "type": "heatmap",
            "x": list(CLASSES),
            "y": list(CLASSES),
            "z": matrix(paired, names),
            "texttemplate": "%{z:.4~g}",
            "showscale": False,
            "xgap": 2,
            "ygap": 2,
            "colorscale": [[0, "@raised"], [1, colour(colours[recipe], 0.75)]],
            "hovertemplate": "%{z:.4~g} prompts from %{y} to %{x}<extra></extra>",
        }
        axes = {f"{axis}axis_type": "category" for axis in "xy"}
        variants[recipe] = variant([trace], "pass rate after", "pass rate before", **axes)
    return chart("test prompts by pass rate before and after training", variants)
