"""The recipe to choose for a given budget, from the fitted validation curves and their uncertainty.

At each budget the advice is the recipe with the highest fitted accuracy, and every recipe that does
not differ from it significantly. Nothing is extrapolated: a recipe that spent less than the budget
counts with its final accuracy, and a recipe whose profile costs the budget or more is excluded.

The draws of two recipes are paired in a random order. All recipes share the validation prompts, so
draws paired by prompt would separate them sooner. The advice is therefore conservative."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from tasks.common.statistics import Floats
from tasks.report.curves import ENDS, Fits, amount, axis_unit, axis_words
from tasks.report.views.charts import Chart, chart, line, variant

NUM_BUDGETS = 40  # evenly spaced up to the largest amount spent
Advice = dict[str, Any]


def advise(fits: Fits) -> dict[str, list[Advice]]:
    """Return the advice at each of NUM_BUDGETS budgets, by axis. The draws are always the same."""
    by_axis = {}
    for axis in next(iter(fits.values())):
        curves = {recipe: of[axis].curve for recipe, of in fits.items()}
        most = max(float(curve.flops[-1]) for curve in curves.values())
        budgets = most * np.arange(1, NUM_BUDGETS + 1) / NUM_BUDGETS
        rng = np.random.default_rng(0)
        # draws in rows, budgets in columns
        drawn = {
            recipe: rng.permutation([draw.at(budgets) for draw in of[axis].draws])
            for recipe, of in fits.items()
        }
        began = {recipe: float(curve.accuracy[0]) for recipe, curve in curves.items()}
        by_axis[axis] = [
            advice_at(
                float(budget),
                {name: float(c.at(budget)) for name, c in curves.items() if c.flops[0] < budget},
                {name: values[:, place] for name, values in drawn.items()},
                began,
            )
            for place, budget in enumerate(budgets)
        ]
    return by_axis


def advice_at(
    budget: float,
    accuracy: Mapping[str, float],
    draws: Mapping[str, Floats],
    began: Mapping[str, float],
) -> Advice:
    """Return the advice at one budget: `take`, the recipe to choose (None if none is affordable);
    `level_with`, the recipes not distinguishable from it; and for each recipe the accuracy at which
    it `began`, its accuracy at the budget, the interval, and the share of draws in which it is the
    `best` (ties are split)."""
    if not accuracy:
        return {"budget": budget, "take": None, "level_with": [], "recipes": {}}
    names = list(accuracy)
    drawn = np.array([draws[name] for name in names])
    wins = drawn >= drawn.max(axis=0) - 1e-12
    best = (wins / wins.sum(axis=0)).mean(axis=1)
    take = max(names, key=lambda name: (accuracy[name], best[names.index(name)]))
    ahead = {
        name: np.quantile(draws[take] - draws[name], ENDS[0]) for name in names if name != take
    }
    recipes = {}
    for name, share in zip(names, best, strict=True):
        low, high = np.quantile(draws[name], ENDS)
        interval = {"began": began[name], "low": float(low), "high": float(high)}
        recipes[name] = {"accuracy": accuracy[name], **interval, "best": float(share)}
    level = [name for name, low in ahead.items() if low <= 0]
    return {"budget": budget, "take": take, "level_with": level, "recipes": recipes}


def advice_words(axis: str, advice: Advice) -> str:
    """Return the advice at one budget as one to three sentences."""
    start = f"With {amount(axis, advice['budget'])}"
    if advice["take"] is None:
        return f"{start}, keep the initial policy: no recipe has begun to train."
    mine = advice["recipes"][advice["take"]]
    words = (
        f"{start}, take {advice['take']}: {mine['accuracy']:.1%} validation accuracy (95 % "
        f"interval {mine['low']:.1%} to {mine['high']:.1%})"
    )
    if len(advice["recipes"]) > 1:
        words += f", the best in {mine['best']:.0%} of the draws"
    if advice["level_with"]:
        words += f". Not significantly worse: {', '.join(advice['level_with'])}"
    if mine["low"] <= mine["began"]:
        words += f". Not shown to be above the {mine['began']:.1%} that it began with"
    return f"{words}."


def chances(advices: Mapping[str, list[Advice]], colours: Mapping[str, int]) -> Chart:
    """Return a chart of the share of draws in which each recipe is the best, against the budget."""
    variants = {}
    for axis, rows in advices.items():
        size, name = axis_unit(axis, rows[-1]["budget"])
        traces = []
        for recipe, index in colours.items():
            xs = [row["budget"] / size for row in rows if recipe in row["recipes"]]
            ys = [row["recipes"][recipe]["best"] for row in rows if recipe in row["recipes"]]
            hover = f"the best in %{{y:.0%}} of the draws with %{{x:,.4~g}} {name}"
            traces.append(line(recipe, index, xs, ys, hover, group=recipe))
        words = axis_words(axis, name)
        layout = {"yaxis_range": [-0.02, 1.02], "xaxis_rangemode": "tozero"}
        variants[axis] = variant(traces, words, "the best recipe", percent="y", **layout)
    return chart("how often each recipe is the best that a budget buys", variants)
