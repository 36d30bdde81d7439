"""The advice at a budget, by hand, from curves with known draws."""

from collections.abc import Sequence

import numpy as np
import pytest

from tasks.report.curves import AXES, Fitted, Monotone
from tasks.report.views.budget import advice_at, advice_words, advise, chances

BEGAN = {"a": 0.3, "b": 0.3}


def fitted(flops: Sequence[float], *rows: Sequence[float]) -> dict[str, Fitted]:
    """Return a curve over every axis: the first row is the fit, all rows are its draws."""
    curves = [Monotone(np.array(flops), np.array(row)) for row in rows]
    return dict.fromkeys(AXES, Fitted(curves[0], curves))


def test_the_best_recipe_changes_with_the_budget() -> None:
    """`early` rises from the start and ends at 20; `late` pays 10 first and rises to 40."""
    fits = {
        "early": fitted([0, 20], [0.4, 0.5], [0.4, 0.5]),
        "late": fitted([10, 40], [0.4, 0.7], [0.4, 0.7]),
    }
    found = advise(fits)["charged"]
    assert [row["budget"] for row in found] == [float(n) for n in range(1, 41)]
    assert list(found[9]["recipes"]) == ["early"], "late has only profiled"
    taken = [row["take"] for row in found]
    # 0.4 + (x - 10) / 100 reaches 0.5, the end of early, at 20: the first of equal recipes is taken
    assert taken == ["early"] * 20 + ["late"] * 20
    assert found[29]["recipes"]["early"]["accuracy"] == pytest.approx(0.5), "no more than its end"
    assert found[29]["recipes"]["late"]["accuracy"] == pytest.approx(0.6)
    assert found[29]["level_with"] == []


def test_the_shares_of_draws_and_equal_recipes() -> None:
    """a is better in three draws of four, and both share the fourth."""
    draws = {"a": np.array([0.6, 0.6, 0.6, 0.5]), "b": np.array([0.5, 0.5, 0.5, 0.5])}
    found = advice_at(1e9, {"a": 0.58, "b": 0.5}, draws, BEGAN)
    assert found["take"] == "a"
    assert found["recipes"]["a"]["best"] == pytest.approx(3.5 / 4)
    assert found["recipes"]["b"]["best"] == pytest.approx(0.5 / 4)
    apart = advice_at(1e9, {"a": 0.58, "b": 0.5}, {**draws, "b": np.full(4, 0.4)}, BEGAN)
    assert (apart["level_with"], apart["recipes"]["a"]["best"]) == ([], 1.0)
    crossing = {**draws, "b": np.array([0.5, 0.7, 0.5, 0.5])}
    level = advice_at(1e9, {"a": 0.58, "b": 0.5}, crossing, BEGAN)
    assert level["level_with"] == ["b"]


def test_the_advice_in_words() -> None:
    draws = {"a": np.full(4, 0.6), "b": np.array([0.5, 0.7, 0.5, 0.5])}
    found = advice_at(2e9, {"a": 0.6, "b": 0.55}, draws, BEGAN)
    assert advice_words("executed", found) == (
        "With 2 GFLOPs executed, take a: 60.0% validation accuracy (95 % interval 60.0% to 60.0%), "
        "the best in 75% of the draws. Not significantly worse: b."
    )
    flat = advice_at(2e9, {"a": 0.6}, {"a": np.array([0.4, 0.7])}, {"a": 0.5})
    assert advice_words("executed", flat).endswith(
        "Not shown to be above the 50.0% that it began with."
    )
    nothing = advice_at(1200.0, {}, draws, BEGAN)
    assert advice_words("rollouts", nothing).startswith("With 1,200 rollouts, keep the initial")


def test_no_recipe_is_advised_below_the_cost_of_profiling() -> None:
    fits = {"late": fitted([10, 40], [0.4, 0.7])}
    found = advise(fits)
    assert [row["take"] for row in found["rollouts"][8:11]] == [None, None, "late"]
    chart = chances(found, {"late": 0})
    assert [one["name"] for one in chart["variants"]] == list(AXES)
    assert chart["variants"][0]["data"][0]["x"][0] == 11.0
