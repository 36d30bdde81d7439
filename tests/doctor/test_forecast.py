"""What a run would cost, with numbers worked out by hand."""

import copy
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from tasks.common.artifacts import PROFILE, PROMPTS
from tasks.common.layout import Layout
from tasks.common.sealed import write_sealed
from tasks.doctor import machine
from tasks.doctor.forecast import Cost, forecast
from tasks.doctor.ranges import Range, around, exactly
from tasks.doctor.rates import MEASURED_FACTOR, STAGE_SECONDS, rates, table
from tests.parameters import every_value

P = 1000.0


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch) -> None:
    monkeypatch.setattr(machine, "gpus", list)


@pytest.fixture
def values() -> dict[str, Any]:
    values = copy.deepcopy(every_value())
    values["sampling"]["max_tokens"] = 100
    values["ingest"]["splits"] = {"train": 10, "validation": 4, "test": 5}
    values["evaluate"]["num_samples"] = 3
    values["train"]["validation"] = {"num_samples": 2, "every_share": 0.5}
    return values


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    """A data root with a described policy."""
    layout = Layout(tmp_path)
    write_sealed(layout.policy_card, {"source": "tiny", "num_matmul_parameters": P})
    return layout


def give_profile(layout: Layout, seconds: float = 2.0) -> None:
    """One prompt of 20 tokens, four samples of 30 tokens: 200 tokens in so many seconds."""
    row = dict.fromkeys(PROFILE.columns)
    row |= {"num_samples": 4, "prompt_tokens": 20, "completion_tokens": 120}
    frame = pl.DataFrame([row], schema_overrides=dict(PROFILE.columns), strict=False)
    layout.profile.mkdir(parents=True)
    frame.write_parquet(layout.profile / "profile.parquet")
    charged, tokens = {"profile": 2 * P * 200}, {"profile": 200.0}
    write_sealed(layout.profile / "flops.json", {"charged": charged, "tokens": tokens})
    write_sealed(layout.profile / "cost.json", {"seconds": {"profile": seconds}})


def cost(values: dict[str, Any], layout: Layout, *stage: Any, stale: bool = False) -> Cost:
    cell = (*stage, None, None)[:3]
    [found], _ = forecast(values, layout, [cell], [("allocate", *cell[1:])] if stale else [])
    assert found is not None
    return found


def test_ranges_work_from_the_least_to_the_most() -> None:
    work, rate = Range(10, 20, 40), Range(1, 2, 4)
    assert work.at(rate) == Range(2.5, 10, 40)
    assert work + exactly(1) == Range(11, 21, 41)
    assert around(6, 2) * rate == Range(3, 12, 48)
    assert work.at_most(15) == Range(10, 15, 15)


def test_an_evaluation_costs_its_samples_and_the_greedy_one(values, layout) -> None:
    """5 prompts, 3 + 1 samples, 20 + 30 tokens each; the untrained policy's lengths are known to a
    tenth."""
    give_profile(layout)
    found = cost(values, layout, "baseline")
    assert found.tokens.middle == 5 * 4 * 50
    assert found.tokens.high == pytest.approx(5 * 4 * (20 + 33))
    assert found.flops.middle == 2 * P * 1000
    seconds = 1000 * 2 / 200  # at the profile's own rate
    assert found.hours.middle == pytest.approx((seconds + STAGE_SECONDS.middle) / 3600)
    assert found.gpu_hours == exactly(0)
    assert cost(values, layout, "evaluate", "grpo", 0).tokens.high == 5 * 4 * (20 + 66)


def test_training_takes_the_plans_own_forecast_unless_it_is_stale(values, layout) -> None:
    """Validation: 4 prompts, 2 samples, 3 points, 50 tokens."""
    give_profile(layout)
    plan = {"plan": {"tokens": 1e5, "tokens_updated": 5e4}}
    write_sealed(layout.plan("grpo", 0) / "forecast.json", plan)
    found = cost(values, layout, "train", "grpo", 0)
    assert found.tokens.middle == 1e5 + 1200
    assert found.flops.middle == 2 * P * (1e5 + 1200) + 6 * P * 5e4
    uniform = cost(values, layout, "train", "grpo", 0, stale=True)
    assert uniform.tokens.middle == 10 * 4 * 8 * 50 + 1200  # prompts, passes, group, tokens


def test_without_a_policy_nothing_is_known(values, tmp_path: Path) -> None:
    values["policy"]["source"] = "hf://org/name@0123"
    costs, why = forecast(values, Layout(tmp_path), [("profile", None, None)], [])
    assert costs == [None]
    assert "its size is unknown" in why


def test_prompts_that_are_there_are_counted(values, layout) -> None:
    give_profile(layout)
    PROMPTS.write(layout.prompts("test"), PROMPTS.frame([]))
    assert cost(values, layout, "baseline").tokens == exactly(0)


def test_rates_are_measured_where_runs_of_the_same_size_say_them(layout) -> None:
    """A run of ten times the size is left out."""
    give_profile(layout)
    for seed, seconds, size in ((0, 1.0, P), (1, 4.0, P), (2, 1.0, 10 * P)):
        folder = layout.train("grpo", seed)
        charged = {"generate": 2 * size * 100, "score": 0.0, "update": 6 * size * 100}
        files = {"charged": charged, "tokens": {"generate": 100.0}}
        write_sealed(folder / "flops.json", files)
        write_sealed(folder / "cost.json", {"seconds": {"train": seconds}})
    found = rates(layout, P, None)
    assert found.sampling.middle == 2 * P * 200 / 2.0
    assert found.training.low == pytest.approx(800 * P / 4.0 / MEASURED_FACTOR)
    assert found.training.high == pytest.approx(800 * P * MEASURED_FACTOR)
    assert "measured in 2 runs" in found.source


def test_rates_are_assumed_where_nothing_was_measured(layout) -> None:
    found = rates(layout, P, "NVIDIA H100 80GB HBM3")
    assert "assumed for NVIDIA H100" in found.source
    assert found.sampling == table("an H100").sampling
    assert table("an H100").training.middle > table("some GPU").training.middle
    assert table(None).training.middle < table("some GPU").training.middle


def test_gpu_hours_count_the_gpus_that_are_used(values, layout, monkeypatch) -> None:
    monkeypatch.setattr(machine, "gpus", lambda: [machine.Gpu("H100", 1e9, 1e9)] * 2)
    values["engine"]["num_processes"] = 2
    found = cost(values, layout, "train", "grpo", 0)
    assert found.gpu_hours.middle == 2 * found.hours.middle
    values["engine"]["device"] = "cpu"
    assert cost(values, layout, "train", "grpo", 0).gpu_hours == exactly(0)
