"""The first sentence: the compared recipe, its claim, and its request."""

from typing import Any

import pytest

from tasks.common.params import Budget
from tasks.report.headline import headline

BUDGET = Budget("executed", 6.0e11)


def recipe(
    pass_at_1: float,
    validation: float,
    difference: tuple[float, float, float] | None = None,
    cost: float = 6.0e11,
) -> dict[str, Any]:
    """Return a recipe of one seed on 1,000 test prompts, with its difference from the reference."""
    found: dict[str, Any] | None = None
    if difference is not None:
        low, mean, high = difference
        found = {"mean": mean, "low": low, "high": high, "num_prompts": 1000}
        half = (high - low) / 2
        found |= {"num_seeds": 1, "over": "prompts", "shows": 1.43 * half}
        found["times"] = round((half / 0.01) ** 2, 6)
    return {
        "pass_at_1": {"mean": pass_at_1},
        "validation": {"mean": validation},
        "differences": {"reference": found},
        "flops_charged_mixed": {"mean": cost},
    }


def summary(times: float | None = 1.6, **recipes: dict[str, Any]) -> dict[str, Any]:
    """Return a summary in which each recipe needs `times` less compute than grpo."""
    points = {name: [{"compute_ratio": {"times": times}}] for name in recipes}
    named = {"grpo": recipe(0.383, 0.40), **recipes}
    return {"reference": "grpo", "recipes": named, "points": points}


def test_a_significant_difference() -> None:
    words = headline(summary(winnow=recipe(0.412, 0.45, (0.008, 0.029, 0.050))), BUDGET)
    assert words == (
        "At 600 GFLOPs executed `winnow` reaches 41.2 %, 2.9 points more than `grpo` (95 % "
        "interval over prompts, one seed, without training noise: +0.8 to +5.0); on validation "
        "`grpo` needed 1.6 times the compute to reach its final accuracy."
    ).replace(" %,", "%,")


def test_a_loss_is_stated_and_claims_no_saving() -> None:
    lost = recipe(0.35, 0.41, (-0.05, -0.033, -0.01))
    words = headline(summary(None, winnow=lost), BUDGET)
    assert "3.3 points fewer than `grpo`" in words
    assert "times the compute" not in words


def test_an_insignificant_difference_names_the_required_prompts() -> None:
    """The half width is 2 points; four times the prompts halve it."""
    words = headline(summary(winnow=recipe(0.391, 0.45, (-0.012, 0.008, 0.028))), BUDGET)
    assert "there is no significant difference" in words
    assert words.endswith(
        "one seed, without training noise: -1.2 to +2.8). "
        "A difference of 2.9 points would have shown with a probability of 80%. About 4,000 test "
        "prompts would resolve one point, training noise aside."
    )
    found = recipe(0.391, 0.45, (-0.012, 0.008, 0.028))
    found["differences"]["reference"] |= {"num_seeds": 3, "over": "seeds and prompts", "times": 3.1}
    asked = "3.1 times as many seeds on 3.1 times as many test prompts would resolve one point."
    assert headline(summary(winnow=found), BUDGET).endswith(asked)
    narrow = headline(summary(winnow=recipe(0.391, 0.45, (-0.004, 0.004, 0.012))), BUDGET)
    assert narrow.endswith("A difference of 1.1 points would have shown with a probability of 80%.")


def test_the_compared_recipe_is_chosen_by_validation() -> None:
    """The best of several on test would be biased."""
    found = summary(
        sgpo=recipe(0.50, 0.41, (0.05, 0.117, 0.2), cost=6.1e11),
        winnow=recipe(0.40, 0.45, (0.001, 0.017, 0.03)),
    )
    assert "`winnow` reaches 40.0%" in headline(found, BUDGET)
    found["recipes"]["sgpo"]["validation"]["mean"] = 0.45  # a tie: the cheaper one
    assert "`winnow` reaches 40.0%" in headline(found, BUDGET)


@pytest.mark.parametrize(
    ("budget", "start"),
    [
        (Budget("rollouts", 4096.0), "At 4,096 rollouts `winnow`"),
        (None, "With compute that differs by recipe (no experiment.budget), `winnow`"),
    ],
)
def test_the_sentence_begins_with_the_budget(budget: Budget | None, start: str) -> None:
    words = headline(summary(winnow=recipe(0.412, 0.45, (0.008, 0.029, 0.050))), budget)
    assert words.startswith(start)
    assert ("needed 1.6 times the rollouts to" in words) == (budget is not None)


def test_a_single_recipe_has_no_comparison() -> None:
    assert headline(summary(), BUDGET).endswith("reaches 38.3%: nothing to compare.")
