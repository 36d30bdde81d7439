"""The benefit of profiling, against sums by hand and against the truth."""

from typing import Any

import numpy as np
import polars as pl
import pytest

from tasks.allocate import judgement
from tasks.allocate.judgement import judge, judgement_words
from tasks.allocate.planning import load_strategy, make_plan
from tasks.allocate.visits import compare
from tests.allocate.test_allocate import SGPO, profile_of


def judged(spec: dict[str, Any], profile: pl.DataFrame, passes: int) -> dict[str, dict[str, Any]]:
    allocation = load_strategy(spec)[1](profile, passes, np.random.default_rng(0))
    plan = make_plan(allocation.phases, profile)
    return judge(compare(plan, profile))


def mix(dead: int, even: int, num_samples: int = 8) -> pl.DataFrame:
    return profile_of([(0, num_samples)] * dead + [(num_samples // 2, num_samples)] * even)


BAND = {"strategy": "band", "trivial_above": 0.9, "group_size": 8}


def test_a_plan_without_dead_prompts_by_hand() -> None:
    """Half of the prompts are certainly dead, half certainly even: profiles of 2,000 samples."""
    found = judged(BAND, mix(40, 40, 2000), passes=1)
    # information 7 p (1 - p) of 40 groups both times; 320 rollouts and 160,000 to profile, or 640
    assert found["rollouts"]["saving"] == pytest.approx(640 / 160_320, rel=0.01)
    assert found["charged"]["saving"] == pytest.approx(4 * 640 / (4 * 320 + 160_000), rel=0.01)
    # groups without a gradient are not updated: one even group of 8 in 128
    mixed = 640 + 3 * 320 * 127 / 128
    alone = 320 + 3 * 320 * 127 / 128
    assert found["charged_mixed"]["saving"] == pytest.approx(mixed / (alone + 160_000), rel=0.01)
    for account, left in (("rollouts", 320), ("charged", 4 * 320), ("charged_mixed", 320)):
        to_pay = found[account]["passes_to_pay"]
        assert to_pay == pytest.approx(160_000 / left, rel=0.01)


def test_profiling_pays_with_more_dead_prompts_and_more_passes() -> None:
    few, many = (judged(BAND, mix(dead, 200), passes=4) for dead in (20, 600))
    for account in ("rollouts", "charged", "charged_mixed"):
        assert few[account]["saving"] < 1 < many[account]["saving"]
        assert few[account]["low"] <= few[account]["saving"] <= few[account]["high"]
    once = judged(BAND, mix(600, 200), passes=1)
    assert once["rollouts"]["saving"] < many["rollouts"]["saving"]
    assert "is expected to pay" in judgement_words(many)
    assert "does not pay in this plan, and is expected to from pass" in judgement_words(few)


def test_small_groups_lose_information_with_any_number_of_passes() -> None:
    found = judged(SGPO, profile_of([(k % 9, 8) for k in range(300)]), passes=50)
    assert found["charged_mixed"]["passes_to_pay"] is None
    assert "however many passes" in judgement_words(found)


def test_the_interval_of_many_prompts_is_drawn_from_some(monkeypatch: pytest.MonkeyPatch) -> None:
    profile = mix(2000, 2000)
    every = judged(BAND, profile, passes=4)["charged_mixed"]
    monkeypatch.setattr(judgement, "MAX_PROMPTS", 500)
    some = judged(BAND, profile, passes=4)["charged_mixed"]
    assert some["saving"] == every["saving"]
    assert some["low"] < some["saving"] < some["high"]
    assert some["high"] - some["low"] == pytest.approx(every["high"] - every["low"], rel=0.2)


def test_the_interval_contains_the_saving_at_the_true_rates() -> None:
    rng = np.random.default_rng(1)
    rates = np.where(rng.random(400) < 0.5, 0.0, rng.beta(1.0, 1.0, 400))
    profile = profile_of([(int(c), 8) for c in rng.binomial(8, rates)])
    allocation = load_strategy(BAND)[1](profile, 8, np.random.default_rng(0))
    plan = make_plan(allocation.phases, profile)
    found = judge(compare(plan, profile))["rollouts"]
    visited = profile["prompt_id"].is_in(plan["prompt_id"].implode()).to_numpy()
    spread = rates * (1 - rates)
    cost = 8 * 8 * visited.sum() + 8 * 400
    true = (8 * 8 * spread[visited].sum() / cost) / (spread.sum() / 400)
    assert found["low"] < true < found["high"]
    assert found["high"] < 1.25 * found["low"]
