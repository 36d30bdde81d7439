"""The first sentence: which recipe is compared, what it claims, and what it asks for."""

from typing import Any

import pytest

from tasks.common.params import Budget
from tasks.report.headline import headline

BUDGET = Budget("executed", 6.0e11)


def recipe(
    pass_at_1: float, validation: float, difference: tuple[float, float, float] | None = None
) -> dict[str, Any]:
    """A recipe of one seed on 1,000 test prompts, with its difference from the reference."""
    found: dict[str, Any] | None = None
    if difference is not None:
        low, mean, high = difference
        found = {"mean": mean, "low": low, "high": high, "num_prompts": 1000}
        found |= {"num_seeds": 1, "over": "prompts"}
    return {
        "pass_at_1": {"mean": pass_at_1},
        "validation": {"mean": validation},
        "differences": {"reference": found},
        "flops_executed": {"mean": 6.0e11},
    }


def summary(times: float | None = 1.6, **recipes: dict[str, Any]) -> dict[str, Any]:
    """`times` less compute took each recipe to what grpo ends with."""
    points = {name: [{"times_less": {"times": times}}] for name in recipes}
    named = {"grpo": recipe(0.383, 0.40), **recipes}
    return {"reference": "grpo", "recipes": named, "points": points}


def test_a_shown_difference() -> None:
    words = headline(summary(winnow=recipe(0.412, 0.45, (0.008, 0.029, 0.050))), BUDGET)
    assert words == (
        "At 600 GFLOPs executed `winnow` reaches 41.2 %, 2.9 points more than `grpo` (95 % "
        "interval over prompts, one seed: +0.8 to +5.0); on validation it needed 1.6 times less "
        "compute for what `grpo` ends with."
    ).replace(" %,", "%,")


def test_a_loss_is_said_as_plainly_and_claims_no_saving() -> None:
    lost = recipe(0.35, 0.41, (-0.05, -0.033, -0.01))
    words = headline(summary(None, winnow=lost), BUDGET)
    assert "3.3 points fewer than `grpo`" in words
    assert "times less" not in words


def test_what_is_not_shown_says_what_would_show_it() -> None:
    """A half width of 2 points: four times the prompts halve it."""
    words = headline(summary(winnow=recipe(0.391, 0.45, (-0.012, 0.008, 0.028))), BUDGET)
    assert "there is no significant difference" in words
    assert words.endswith("About 4,000 test prompts, or more seeds, would resolve one point.")


def test_validation_chooses_what_is_compared() -> None:
    """The best of several on test would look better than it is."""
    found = summary(
        sgpo=recipe(0.50, 0.41, (0.05, 0.117, 0.2)), winnow=recipe(0.40, 0.45, (0.001, 0.017, 0.03))
    )
    assert "`winnow` reaches 40.0%" in headline(found, BUDGET)


@pytest.mark.parametrize(
    ("budget", "start"),
    [
        (Budget("rollouts", 4096.0), "At 4,096 rollouts `winnow`"),
        (None, "With compute that differs by recipe (no experiment.budget), `winnow`"),
    ],
)
def test_it_begins_with_what_was_spent(budget: Budget | None, start: str) -> None:
    words = headline(summary(winnow=recipe(0.412, 0.45, (0.008, 0.029, 0.050))), budget)
    assert words.startswith(start)


def test_one_recipe_has_nothing_to_compare() -> None:
    assert headline(summary(), BUDGET).endswith("reaches 38.3%: nothing to compare.")
