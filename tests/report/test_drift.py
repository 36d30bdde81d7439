"""The age of the profile: expectations by hand, ragged groups, excluded errors, fresh and stale
profiles, the message."""

import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import polars as pl
import pytest

from tasks.common.artifacts import STEPS, TRAIN_ROLLOUTS, Layout
from tasks.common.checksums import read_checked
from tasks.common.statistics import wilson_interval
from tasks.report.drift import (
    bins,
    drift_of,
    groups_of,
    interval,
    pass_of,
    predicted,
    stale_words,
)
from tests.report.conftest import profile_of, run_report, write_rollouts

Groups = Sequence[tuple[int, str, Sequence[str]]]


def training_of(groups: Groups) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Return steps and rollouts of groups of (pass, prompt, outcomes), one per step."""
    steps = [
        {**STEPS.example, "step": step, "pass": number}
        for step, (number, _, _) in enumerate(groups)
    ]
    rows = [
        {**TRAIN_ROLLOUTS.example, "step": step, "prompt_id": prompt, "outcome": outcome}
        for step, (_, prompt, outcomes) in enumerate(groups)
        for outcome in outcomes
    ]
    return STEPS.frame(steps), TRAIN_ROLLOUTS.frame(rows)


def outcomes(right: int, wrong: int) -> list[str]:
    return ["correct"] * right + ["wrong"] * wrong


def simulated(
    seed: int, group_size: int, num_prompts: int, shift: float, chosen: Sequence[int]
) -> pl.DataFrame:
    """Return groups of prompts with true rates from Beta(1, 1), profiled 8 times. Prompts solved
    `chosen` times are trained on by a policy whose rates are `shift` higher."""
    rng = np.random.default_rng(seed)
    rates = rng.beta(1, 1, num_prompts)
    solved = rng.binomial(8, rates)
    profile = profile_of({f"p{i}": (int(k), 8 - int(k), 0) for i, k in enumerate(solved)})
    right = rng.binomial(group_size, np.clip(rates + shift, 0, 1))
    groups = [
        (0, f"p{i}", outcomes(int(right[i]), group_size - int(right[i])))
        for i in range(num_prompts)
    ]
    kept = [group for group, k in zip(groups, solved, strict=True) if k in chosen]
    return groups_of(*training_of(kept), profile)


def test_the_prediction_of_a_group() -> None:
    """Beta(1, 1) and 1 of 2: Beta(2, 2). E[p] = 1/2; E[p^4] = 2*3*4*5 / (4*5*6*7) = 1/7, the same
    for (1-p)^4."""
    groups = pl.DataFrame({"correct": [1, 0], "trials": [2, 2], "size": [4, 2]})
    expected, variance, mixed = predicted(groups, (1.0, 1.0))
    assert expected.to_list() == [0.5, 0.25]
    assert variance.to_list() == pytest.approx([0.25 / 4 * 8 / 5, 0.1875 / 2 * 6 / 5])
    # Beta(1, 3): E[p^2] = 1*2/20, (3*4)/20
    assert mixed.to_list() == pytest.approx([5 / 7, 1 - 2 / 20 - 12 / 20])


def test_groups_are_ragged_and_exclude_errors() -> None:
    profile = profile_of({"a": (1, 7, 0), "b": (4, 4, 0), "c": (6, 1, 1), "ungraded": (0, 0, 8)})
    training = training_of(
        [
            (0, "a", [*outcomes(1, 1), "error", "error"]),
            (0, "b", outcomes(3, 5)),
            (1, "c", [*outcomes(2, 0), "truncated"]),
            (1, "b", ["error"] * 4),
            (1, "ungraded", outcomes(1, 1)),
        ]
    )
    groups = groups_of(*training, profile)
    assert groups.select("pass", "prompt_id", "size", "success", "mixed", "trials").rows() == [
        (0, "a", 2, 0.5, True, 8),
        (0, "b", 8, 0.375, True, 8),
        (1, "c", 3, pytest.approx(2 / 3), True, 7),
    ]


def test_a_step_may_have_several_groups_of_one_prompt() -> None:
    steps, rollouts = training_of([(0, "a", outcomes(2, 2))])
    rollouts = rollouts.with_columns(pl.Series("group", [0, 1, 0, 1], pl.Int32))
    groups = groups_of(steps, rollouts, profile_of({"a": (1, 7, 0), "b": (4, 4, 0)}))
    assert groups["success"].to_list() == [0.5, 0.5]


def groups_in_bins(rows: Sequence[tuple[int, float, float]]) -> pl.DataFrame:
    """Return groups of 4 as (bin, expected, success), with a variance of 0.04 and a forecast mixed
    share of one half."""
    frame = pl.DataFrame(rows, schema=["bin", "expected", "success"], orient="row")
    fixed = {"size": 4, "variance": 0.04, "mixed_expected": 0.5}
    mixed = (pl.col("success") % 1 != 0).alias("mixed")
    return frame.with_columns(
        mixed, pl.col("bin").alias("profiled"), *(pl.lit(v).alias(k) for k, v in fixed.items())
    )


def test_a_pass_by_hand() -> None:
    """Three groups are on average 0.25 above expectation (0.5, 0.25 and 0), one is 0.25 below."""
    one = pass_of(
        groups_in_bins([(0, 0.25, 0.75), (0, 0.25, 0.5), (0, 0.25, 0.25), (1, 0.75, 0.5)])
    )
    assert (one["num_groups"], one["group_size_mean"]) == (4, 4.0)
    assert (one["success"], one["expected"]) == (0.5, 0.375)
    assert one["drift"] == pytest.approx(0.125)
    assert one["gap"] == pytest.approx(3 / 4 * 0.25 + 1 / 4 * 0.25)
    chance = np.sqrt(2 / np.pi) * 0.2 * (3 / 4 / np.sqrt(3) + 1 / 4)
    assert one["chance"] == pytest.approx(chance)
    assert (one["mixed_rate"], one["mixed_rate_forecast"]) == (1.0, 0.5)
    assert [(row["num_groups"], row["expected"], row["success"]) for row in one["bins"]] == [
        (3, 0.25, 0.5),
        (1, 0.75, 0.5),
    ]


@pytest.mark.parametrize(
    ("success", "sizes", "trials"),
    [
        ([0.0, 1.0], [4, 4], 2.0),  # maximally different groups: each is worth one rollout
        ([0.25, 0.75], [4, 4], 4.0),  # variance of the mean 0.125 / 2; 0.25 / 0.0625 = 4
        # they agree: all rollouts count, but unequal sizes reduce the weight
        ([1.0, 1.0, 1.0], [2, 4, 8], 9 / 0.875),
        ([0.5], [8], 8.0),
    ],
)
def test_the_interval_over_rollouts_accounts_for_shared_prompts(
    success: list[float], sizes: list[int], trials: float
) -> None:
    low, high = wilson_interval(np.mean(success) * trials, trials)
    assert interval(np.array(success), np.array(sizes)) == pytest.approx((float(low), float(high)))


def test_bins_are_values_if_there_are_few_and_eighths_otherwise() -> None:
    few = profile_of({"a": (0, 3, 0), "b": (2, 1, 0), "c": (2, 1, 0), "d": (0, 0, 2)})
    assert few.select(bins(few)).to_series().to_list() == [1, 2, 2, None]
    many = profile_of({str(right): (right, 16 - right, 0) for right in range(17)})
    eighths = [(right + 1) // 2 for right in range(17)]  # the nearest of 0/8 to 8/8
    assert many.select(bins(many)).to_series().to_list() == eighths


def test_regression_of_selected_prompts_to_the_mean_is_no_drift() -> None:
    """Under Beta(1, 1), prompts solved 0 of 8 times have a mean rate of 1/10 and are solved that
    often."""
    groups = simulated(0, group_size=8, num_prompts=8000, shift=0.0, chosen=[0])
    assert groups["success"].mean() == pytest.approx(0.1, abs=0.015)
    assert groups["profiled"].mean() == 0.0
    found = drift_of(groups, stale_above=0.03)
    assert abs(found["drift"]) < 0.015
    assert not found["stale"]


def test_a_stale_profile_and_the_threshold() -> None:
    groups = simulated(0, group_size=4, num_prompts=2000, shift=0.2, chosen=[1, 2, 3, 4])
    found = drift_of(groups, stale_above=0.15)
    assert found["drift"] == pytest.approx(0.2, abs=0.02)
    assert found["gap"] == pytest.approx(found["drift"]), "every bin moved the same way"
    assert found["stale"]
    assert not drift_of(groups, stale_above=0.25)["stale"]


def test_a_short_run_does_not_make_a_fresh_profile_stale() -> None:
    """The gap of eight groups of 2 is large by chance in most runs."""
    runs = [drift_of(simulated(seed, 2, 8, 0.0, range(9)), stale_above=0.15) for seed in range(60)]
    assert np.mean([run["gap"] > 0.15 for run in runs]) > 0.5
    assert np.mean([run["stale"] for run in runs]) < 0.1
    assert np.mean([run["chance"] for run in runs]) == pytest.approx(
        np.mean([run["gap"] for run in runs]), rel=0.25
    )


def test_the_last_pass_decides_whether_the_profile_is_stale() -> None:
    profile = profile_of({f"p{i}": (i % 9, 8 - i % 9, 0) for i in range(180)})
    right = [(number, f"p{i}", outcomes(8, 0)) for number in (0, 1) for i in range(180)]
    as_profiled = [
        (number, f"p{i}", outcomes(i % 9, 8 - i % 9)) for number in (0, 1) for i in range(180)
    ]
    first_moved, last_moved = right[:180] + as_profiled[180:], as_profiled[:180] + right[180:]
    assert not drift_of(groups_of(*training_of(first_moved), profile), 0.15)["stale"]
    found = drift_of(groups_of(*training_of(last_moved), profile), 0.15)
    assert found["stale"]
    assert [one["pass"] for one in found["passes"]] == [0, 1]
    assert [round(one["mixed_rate"], 3) for one in found["passes"]] == [round(7 / 9, 3), 0.0]


def test_a_training_of_no_step_has_no_drift() -> None:
    nothing = groups_of(STEPS.frame([]), TRAIN_ROLLOUTS.frame([]), profile_of({"a": (1, 1, 0)}))
    assert drift_of(nothing, 0.15)["passes"] == []


@pytest.mark.parametrize(
    ("drift", "gap", "words"),
    [
        (0.214, 0.214, "solved 21 points more often than profiled: the profile is stale"),
        (-0.3, 0.3, "solved 30 points less often than profiled"),
        (0.02, 0.3, "solved 30 points away from what was profiled, some more and some less often"),
    ],
)
def test_the_message_on_a_stale_profile(drift: float, gap: float, words: str) -> None:
    message = stale_words("sgpo/0", {"drift": drift, "gap": gap}, reads_profile=True)
    assert message.startswith(f"sgpo/0: in the last pass prompts were {words}")
    assert "would re-size groups" in message
    assert "re-size" not in stale_words("grpo/0", {"drift": drift, "gap": gap}, reads_profile=False)


def shown(layout: Layout) -> tuple[dict[str, Any], str]:
    """Return the drift in the summary, and the page."""
    drift = read_checked(layout.report / "summary.json")["drift"]
    return drift, (layout.report / "index.html").read_text()


def test_a_fresh_profile_has_no_warning(reported: Layout) -> None:
    drift, html = shown(reported)
    assert "stale" not in (reported.root.parent / "output").read_text()
    assert {name: run["stale"] for name, run in drift.items()} == dict.fromkeys(
        ("grpo/0", "grpo/1", "sgpo/0", "sgpo/1"), False
    )
    assert "the profile still describes the policy well enough" in html


def test_a_stale_profile_is_reported_in_log_page_and_summary(layout: Layout) -> None:
    write_rollouts(layout, "sgpo", 0, more=4)
    log = run_report(layout, seeds=[0])
    drift, html = shown(layout)
    assert (drift["sgpo/0"]["stale"], drift["grpo/0"]["stale"]) == (True, False)
    assert [one["pass"] for one in drift["sgpo/0"]["passes"]] == [0, 1]
    words = stale_words("sgpo/0", drift["sgpo/0"], reads_profile=True)
    assert words in log
    assert f'<div class="box warning">{words}.</div>' in html
    assert json.dumps(drift).count("null") == 0
