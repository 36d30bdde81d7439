"""The report's first sentence: the best recipe at this budget, its lead, and how certain it is."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from tasks.common.params import Budget
from tasks.common.statistics import POINT, POWER
from tasks.report.curves import amount
from tasks.report.paired import is_apart, points_words
from tasks.report.points import budget_account

# the account that decides between equal policies: updates without a gradient are free in it
CHEAPER = "flops_charged_mixed"


def headline(summary: Mapping[str, Any], budget: Budget | None) -> str:
    """Return a sentence that compares test pass@1 of the reference and of the recipe that is best
    on validation among the others. If chosen on test, it would look better than it is."""
    reference = summary["reference"]
    start = (
        "With compute that differs by recipe (no experiment.budget),"
        if budget is None
        else f"At {amount(budget.account, budget.amount)}"
    )
    recipes, recipe = summary["recipes"], compared(summary)
    if recipe is None:
        return f"{start} `{reference}` reaches {reached(recipes[reference])}: nothing to compare."
    mine, other = recipes[recipe], recipes[reference]
    gap = mine["differences"]["reference"]
    points = 100 * gap["mean"]
    is_one = gap["num_seeds"] == 1
    seeds = "one seed, without training noise" if is_one else f"{gap['num_seeds']} seeds"
    sure = f"95 % interval over {gap['over']}, {seeds}: {points_words(gap)}"
    if is_apart(gap):
        word, less = "more" if points > 0 else "fewer", ""
        if (times := compute_ratio(summary)) is not None:
            what = "rollouts" if budget_account(budget) == "rollouts" else "compute"
            less = (
                f"; on validation `{reference}` needed {times:.1f} times the {what} to reach its "
                "final accuracy"
            )
        return (
            f"{start} `{recipe}` reaches {reached(mine)}, {abs(points):.1f} points {word} than "
            f"`{reference}` ({sure}){less}."
        )
    return (
        f"{start} there is no significant difference: `{recipe}` reaches {reached(mine)} and "
        f"`{reference}` {reached(other)} ({points:+.1f} points, {sure}). "
        f"{to_resolve(gap)}"
    )


def compared(summary: Mapping[str, Any]) -> str | None:
    """Return the recipe other than the reference with the best mean validation, or None."""
    recipes = summary["recipes"]
    others = [name for name in recipes if name != summary["reference"]]
    return best_on_validation(recipes, others)[0] if others else None


def best_on_validation(recipes: Mapping[str, Any], names: Sequence[str]) -> list[str]:
    """Return those of `names` with the best mean validation accuracy, the cheapest in CHEAPER
    first."""
    means = {name: round(recipes[name]["validation"]["mean"], 12) for name in names}
    tied = [name for name in names if means[name] == max(means.values())]
    return sorted(tied, key=lambda name: float(recipes[name][CHEAPER]["mean"]))


def reached(summary: Mapping[str, Any]) -> str:
    """Return a recipe's mean pass@1 on test as text."""
    return f"{summary['pass_at_1']['mean']:.1%}"


def compute_ratio(summary: Mapping[str, Any]) -> float | None:
    """Return the compute of the reference / that of the compared recipe, to the reference's final
    accuracy, by the fitted validation curves. Return None if it is unknown or not above 1, or if
    the difference on test is not significant."""
    if (recipe := compared(summary)) is None:
        return None
    times = summary["points"][recipe][-1]["compute_ratio"]["times"]
    is_told = is_apart(summary["recipes"][recipe]["differences"]["reference"])
    return float(times) if is_told and times is not None and times > 1.0 else None


def to_resolve(gap: Mapping[str, Any]) -> str:
    """Return which difference would have shown, and how many prompts, or seeds and prompts, would
    resolve one percentage point: more seeds alone leave the variance over prompts."""
    shows = f"{100 * gap['shows']:.1f} points"
    seen = f"A difference of {shows} would have shown with a probability of {POWER:.0%}."
    if gap["high"] - gap["low"] <= 2 * POINT:
        return seen
    if gap["num_seeds"] == 1:
        needed = f"About {math.ceil(gap['num_prompts'] * gap['times']):,} test prompts"
        return f"{seen} {needed} would resolve one point, training noise aside."
    times = f"{gap['times']:.1f} times as many"
    return f"{seen} About {times} seeds on {times} test prompts would resolve one point."
