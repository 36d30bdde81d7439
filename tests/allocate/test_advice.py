"""The advice on a profile, with numbers by hand."""

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from tasks.allocate.advice import advise, forecast_of, left_out
from tasks.allocate.budget import compared_plan, planned, resolution
from tasks.common.artifacts import PROFILE, ROLLOUTS
from tasks.common.checksums import write_checked
from tasks.common.layout import Layout
from tasks.train import needs
from tasks.train.settings import TrainSettings
from tests.allocate.test_allocate import profile_of
from tests.parameters import every_value

CARD = {"num_matmul_parameters": 10, "num_head_parameters": 0, "num_layers": 1}
CARD |= {"attention_width": 1}
BAND = {"allocate": {"strategy": "band", "trivial_above": 0.9, "group_size": 8}, "train": {}}


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    """Return a profile of 200 samples for 40 prompts: 20 certainly dead, 20 certainly even."""
    layout = Layout(tmp_path)
    write_checked(layout.policy_card, CARD)
    PROFILE.write(layout.profile / "profile.parquet", profile_of([(0, 200), (100, 200)] * 20))
    samples = ROLLOUTS.frame([ROLLOUTS.example])[np.zeros(8_000, dtype=np.uint32)]
    ROLLOUTS.write(layout.profile / "rollouts.parquet", samples)
    return layout


@pytest.fixture
def values() -> dict[str, Any]:
    values = every_value()
    values["recipes"] = {**values["recipes"], "alive": BAND}
    budget = {"account": "rollouts", "amount": 10_000.0}
    values["experiment"] = {"recipes": ["grpo", "alive"], "seeds": [0], "budget": budget}
    return values


def test_information_is_for_the_compute_without_the_profile(values, layout: Layout) -> None:
    """A quarter of 7 of 8 rollouts of every even prompt: half of `grpo`'s rollouts, and all of
    `alive`'s, which has a fifth of the budget."""
    profile = PROFILE.read(layout.profile / "profile.parquet")
    grpo, alive = (forecast_of(values, layout, profile, name) for name in ("grpo", "alive"))
    assert (grpo.profile, alive.profile) == (0.0, 0.8)
    assert (grpo.rollouts, alive.rollouts) == (10_000, 2_000)
    assert grpo.information == pytest.approx(0.5 * 7 / 8 / 4, rel=0.03)
    assert alive.information == pytest.approx(0.2 * 7 / 8 / 4, rel=0.03)
    assert grpo.mixed == pytest.approx(0.5 * 127 / 128, rel=0.03)
    pods = forecast_of(values, layout, profile, "pods")  # it trains on 4 of 16 rollouts
    assert pods.mixed == pytest.approx(0.5 * 4 / 16, rel=0.03)
    values["train"]["max_steps"] = 3
    for name, num in (("grpo", 32), ("replay", 16), ("brorl", 128)):  # replayed half, one group
        assert forecast_of(values, layout, profile, name).rollouts == 3 * num
    is_dead = pl.col("correct") == 0  # `alive` has no rollouts of these long prompts
    longer = profile.with_columns(prompt_tokens=pl.when(is_dead).then(900).otherwise(7))
    assert planned(compared_plan(values, longer, "alive"), TrainSettings()).prompt == 7.0


def test_the_advice_in_words(values, layout: Layout) -> None:
    text = "\n".join(advise(values, layout))
    assert "Of 40 prompts 20 were never solved and 0 always: 50% had equal rewards." in text
    assert (
        "`grpo` has the most information about the gradient for its compute, and `alive` 40%"
        in text
    )
    assert "alive: profiling does not pay in this plan" in text
    assert text.endswith("No runs are compared yet: `winnow run` trains and compares them.")


def test_groups_of_one_are_not_judged_by_their_contrast(values, layout: Layout) -> None:
    values["experiment"]["recipes"] = ["grpo", "alive", "a_star_po"]
    lines = list(advise(values, layout))
    assert [line.partition(":")[0] for line in lines if ": profiling" in line] == ["alive"]


def test_after_runs_the_advice_has_the_reports_sentence(values, layout: Layout) -> None:
    summary = {"recipes": {"grpo": {}, "alive": {}}, "headline": "About 9 more seeds would."}
    summary["policies"] = {"grpo/1": "3f2a"}
    write_checked(layout.trained_card("grpo", 1), {"digest": "3f2a"})
    write_checked(layout.report / "summary.json", summary)
    assert list(advise(values, layout))[-1] == "After the runs: About 9 more seeds would."
    values["experiment"]["recipes"] = ["grpo", "winnow"]
    assert "The report compares alive, grpo" in list(advise(values, layout))[-1]
    write_checked(layout.trained_card("grpo", 1), {"digest": "77b0"})
    assert "The report is stale: grpo/1 has other weights" in list(advise(values, layout))[-1]


def test_nothing_is_ranked_without_a_success(values, layout: Layout) -> None:
    """Most samples are wrong, so `sampling.max_tokens` is not named."""
    PROFILE.write(layout.profile / "profile.parquet", profile_of([(0, 200)] * 40))
    prompts, words = advise(values, layout)
    assert "40 were never solved" in prompts
    assert words == (
        "Recipes are not ranked, because no sample of the profile is correct: of 8,000 samples "
        "8,000 wrong. To change that, choose easier prompts or a better policy."
    )


def test_slots_outside_the_model_are_named(values, layout: Layout) -> None:
    values["experiment"]["recipes"] = ["grpo", "winnow", "grpo_mixed"]
    text = "\n".join(advise(values, layout))
    assert "does not model: winnow (control, advantage)" in text
    assert "`grpo_mixed`" in text
    assert left_out(needs.read_train(values["train"])) == []


def test_the_resolution_of_the_test_prompts(values, layout: Layout) -> None:
    """Two means of 4 samples over 1,024 prompts: 1.96 sqrt(2 / 4 / 4 / 1,024) at worst. With
    prompts solved in 1 of 2 and in 0 of 2 samples the mean p (1 - p) is 1/4 as well."""
    values["ingest"]["splits"]["test"], values["evaluate"]["num_samples"] = 0, 4
    assert resolution(values, layout) == ""
    values["ingest"]["splits"]["test"] = 1024
    assert "1,024 test prompts with 4 samples resolve 2.2 points" in resolution(values, layout)
    assert "at worst" in resolution(values, layout)
    assert "about 4,802 prompts would resolve one point" in resolution(values, layout)
    rows = [
        {**ROLLOUTS.example, "prompt_id": prompt, "greedy": False, "outcome": outcome}
        for prompt, outcome in [("a", "correct"), ("a", "wrong"), *[("b", "wrong")] * 6]
    ]
    ROLLOUTS.write(layout.baseline / "rollouts.parquet", ROLLOUTS.frame(rows))
    found = resolution(values, layout)
    assert "resolve 2.2 points between two policies, if both have the baseline's" in found
    ROLLOUTS.write(layout.baseline / "rollouts.parquet", ROLLOUTS.frame(rows[2:]))  # none is right
    assert "resolve 2.2 points between two policies, at worst" in resolution(values, layout)
