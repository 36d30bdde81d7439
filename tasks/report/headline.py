"""The sentence that comes first: with this budget, which recipe, by how much, how sure."""

import math
from collections.abc import Mapping
from typing import Any

from tasks.common.params import Budget
from tasks.report.charts import flops_words
from tasks.report.curves import COMPARED
from tasks.report.paired import is_apart

FLOPS = ("charged", "charged_mixed", "executed")


def headline(summary: Mapping[str, Any], budget: Budget | None) -> str:
    """Return the comparison of the recipe that validation chooses with the reference, on the test
    prompts; where validation chooses the reference, of the best other one. Only one comparison is
    made, and not by test accuracy: the best of several on test would look better than it is."""
    start, reference = budget_words(budget), summary["reference"]
    recipes = summary["recipes"]
    others = [name for name in recipes if name != reference]
    if not others:
        return f"{start} `{reference}` reaches {reached(recipes[reference])}: nothing to compare."
    chosen = max(others, key=lambda name: float(recipes[name]["validation"]["mean"]))
    mine, other = recipes[chosen], recipes[reference]
    found = mine["differences"]["reference"]
    points = 100 * found["mean"]
    seeds = "one seed" if found["num_seeds"] == 1 else f"{found['num_seeds']} seeds"
    sure = (
        f"95 % interval over {found['over']}, {seeds}: {100 * found['low']:+.1f} to "
        f"{100 * found['high']:+.1f}"
    )
    if is_apart(found):
        word = "more" if points > 0 else "fewer"
        return (
            f"{start} `{chosen}` reaches {reached(mine)}, {abs(points):.1f} points {word} than "
            f"`{reference}` ({sure}){less_compute(mine, other, reference, budget)}."
        )
    return (
        f"{start} there is no significant difference: `{chosen}` reaches {reached(mine)} and "
        f"`{reference}` {reached(other)} ({points:+.1f} points, {sure}). "
        f"{to_resolve(found, mine, other)}"
    )


def budget_words(budget: Budget | None) -> str:
    """Return what every recipe spent, as the start of the sentence."""
    if budget is None:
        return "With compute that differs by recipe (no experiment.budget),"
    if budget.account in FLOPS:
        return f"At {flops_words(budget.amount)} {budget.account}"
    return f"At {budget.amount:,.0f} {budget.account}"


def reached(summary: Mapping[str, Any]) -> str:
    """Return a recipe's pass@1 on test."""
    return f"{summary['pass_at_1']['mean']:.1%}"


def less_compute(
    mine: Mapping[str, Any], other: Mapping[str, Any], reference: str, budget: Budget | None
) -> str:
    """Return how much less compute a recipe needed for what the reference ends with, by the fitted
    validation curves; nothing where that is not known, or not less."""
    account = budget.account if budget is not None else "executed"
    if account not in COMPARED:
        return ""
    needed = mine["compute_to_reference"][account]["flops"]
    if not needed or needed >= other[f"flops_{account}"]["mean"]:
        return ""
    ratio = other[f"flops_{account}"]["mean"] / needed
    return f"; on validation it needed {ratio:.1f} times less for what `{reference}` ends with"


def to_resolve(found: Mapping[str, Any], mine: Mapping[str, Any], other: Mapping[str, Any]) -> str:
    """Return what would resolve a difference of one point: an interval's width falls with the root
    of the number of prompts, or of seeds."""
    half = (found["high"] - found["low"]) / 2
    factor = (half / 0.01) ** 2
    if factor <= 1:
        return "A difference of one point would have shown."
    hours = (mine["seconds"]["mean"] + other["seconds"]["mean"]) / 3600
    if found["num_seeds"] == 1:
        num_prompts = math.ceil(factor * found["num_prompts"])
        return (
            f"About {num_prompts:,} test prompts would resolve one point; a second seed of both "
            f"takes {hours:.2g} hours on this machine."
        )
    more = math.ceil(found["num_seeds"] * (factor - 1))
    return (
        f"About {more} more seeds would resolve one point; they take {more * hours:.2g} hours on "
        "this machine."
    )
