"""The recipes at equal compute: the accuracy of each at the shares of the budget where its branches
and its run end (`train.branches`), compared with the reference's accuracy.

Accuracies are on the validation prompts, because the policy of a branch is not kept and cannot be
evaluated on test. The interval of a difference comes from the fitted curves. It tends to be too
wide: the curves are drawn independently although the prompts are the same."""

from typing import Any

import numpy as np
import polars as pl

from tasks.common.params import Budget
from tasks.report.curves import AXES, ENDS, Fits, Fitted

Point = dict[str, Any]


def points_of(
    curves: pl.DataFrame, fits: Fits, reference: str, budget: Budget | None, axis: str
) -> dict[str, list[Point]]:
    """Return the points (`point_of`) by recipe, the smallest share first. Without a budget, return
    only the end, because equal shares of unequal runs are not equal compute."""
    is_last = (pl.int_range(pl.len()) == pl.len() - 1).over("run")
    ends = curves.select(
        "recipe",
        pl.when(is_last).then(1.0).otherwise(pl.col("branch")).alias("share"),
        "accuracy",
        pl.col(AXES[axis]).cast(pl.Float64).alias("compute"),
    )
    shown = pl.col("share").is_not_null() if budget is not None else pl.col("share") == 1.0
    means = ends.filter(shown).group_by("recipe", "share").mean().sort("share")
    others = {row["share"]: row for row in means.filter(recipe=reference).to_dicts()}
    return {
        recipe: [
            point_of(mine, others.get(mine["share"]), fits[recipe][axis], fits[reference][axis])
            for mine in means.filter(recipe=recipe).to_dicts()
        ]
        for recipe in fits
    }


def budget_account(budget: Budget | None) -> str:
    """Return the account for equal compute: the budget's if it is one of AXES, else `executed`."""
    return budget.account if budget is not None and budget.account in AXES else "executed"


def point_of(mine: Point, other: Point | None, fit: Fitted, reference: Fitted) -> Point:
    """Return a recipe's point at one share: its mean `accuracy` over the seeds; the difference from
    the reference with the 95 % interval; and `compute_ratio`, the compute of the reference / that
    of the recipe, to the reference's accuracy at this share, with the interval (None beyond the
    compute spent). The reference is not compared with itself."""
    point = {"share": mine["share"], "accuracy": mine["accuracy"]}
    if other is None or fit is reference:
        return {**point, "over_reference": None, "compute_ratio": None}
    rng = np.random.default_rng(0)  # the draws are the same in every run of the report
    drawn, beside = (
        rng.permutation([float(draw.at(np.array(place["compute"]))) for draw in fitted.draws])
        for fitted, place in ((fit, mine), (reference, other))
    )
    low, high = np.quantile(drawn - beside, ENDS)
    over = {"mean": mine["accuracy"] - other["accuracy"], "low": float(low), "high": float(high)}
    needed = fit.compute_to(other["accuracy"])
    times, high, low = (other["compute"] / x if x else None for x in needed.values())
    less = {"times": times, "low": low, "high": high}
    return {**point, "over_reference": over, "compute_ratio": less}
