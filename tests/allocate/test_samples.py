"""The profile's samples in a recipe's outputs: the stages read them from the store."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from tasks.common.accounting.spending import CellBudget, read_budget
from tasks.common.artifacts import PLAN, ROLLOUTS, SAMPLES, Layout
from tasks.common.checksums import read_checked
from tests.stages import run_stage
from tests.train.worlds import PARAMS, make_world

REPLAY = {"replay": {"method": "profile", "share": 0.5, "capacity": 4}}


@pytest.fixture
def profiled(request: Any, guesser: Path, tmp_path: Path) -> Layout:
    """Return a world with a profile; the store has log-probabilities only on request."""
    layout = make_world(tmp_path, guesser, [4] * 12)
    values = {
        **PARAMS,
        "store": {**PARAMS["store"], "logprobs": getattr(request, "param", False)},
        "profile": {"num_samples": 6},
        "allocate": {"passes": 1, "seed": 0},
        "recipes": {
            name: {"allocate": {"strategy": "uniform", "group_size": 4}, "train": train}
            for name, train in (("r", REPLAY), ("plain", {}))
        },
    }
    (layout.root / "params.yaml").write_text(yaml.safe_dump(values))
    assert stage("profile", layout).returncode == 0
    return layout


def stage(name: str, layout: Layout, *options: str) -> Any:
    return run_stage(name, layout.root / "params.yaml", layout.root, *options)


def allocate(layout: Layout, recipe: str) -> Any:
    return stage("allocate", layout, "--recipe", recipe, "--seed", "0")


@pytest.mark.parametrize("profiled", [False, True], indirect=True)
def test_samples_of_the_plan_are_those_of_the_profile(profiled: Layout) -> None:
    assert allocate(profiled, "r").returncode == 0
    samples = SAMPLES.read(profiled.plan("r", 0) / "samples.parquet")
    plan = PLAN.read(profiled.plan("r", 0) / "plan.parquet")
    assert samples["prompt_id"].unique(maintain_order=True).to_list() == plan["prompt_id"].to_list()
    rollouts = ROLLOUTS.read(profiled.profile / "rollouts.parquet")
    both = samples.join(rollouts, on=["prompt_id", "sample_index"], suffix="_profile")
    assert len(both) == len(samples) == len(rollouts) == 36
    assert both["outcome"].equals(both["outcome_profile"], check_names=False)
    assert (both["token_ids"].list.len() == both["completion_tokens"]).all()
    values = yaml.safe_load((profiled.root / "params.yaml").read_text())
    kept = samples["logprobs"].null_count() == 0
    assert kept == values["store"]["logprobs"]
    assert read_checked(profiled.plan("r", 0) / "forecast.json")["reads_profile"]
    trained = stage("train", profiled, "--recipe", "r", "--seed", "0")
    assert trained.returncode == 0, trained.output
    scored = read_checked(profiled.train("r", 0) / "flops.json")["charged"]["score"]
    assert (scored > 0) == (not kept)


def test_a_store_without_the_samples_is_named_if_a_recipe_reads_them(profiled: Layout) -> None:
    shutil.rmtree(profiled.store)
    assert allocate(profiled, "plain").returncode == 0
    assert SAMPLES.read(profiled.plan("plain", 0) / "samples.parquet").is_empty()
    assert not read_checked(profiled.plan("plain", 0) / "forecast.json")["reads_profile"]
    result = allocate(profiled, "r")
    assert result.returncode == 1
    assert "the rollout store lacks 36 of the profile's 36 samples" in result.output
    assert "run `python -m tasks.profile`" in result.output
    assert stage("profile", profiled).returncode == 0
    assert allocate(profiled, "r").returncode == 0


def test_a_recipe_that_reads_the_profile_spends_budget_on_it(profiled: Layout) -> None:
    rollouts = ROLLOUTS.read(profiled.profile / "rollouts.parquet")
    set_budget(profiled, {"account": "rollouts", "amount": 100.0})
    for recipe, spent in (("r", float(len(rollouts))), ("plain", 0.0)):
        assert allocate(profiled, recipe).returncode == 0
        found = read_budget(profiled.plan(recipe, 0) / "budget.json")
        assert found == CellBudget("rollouts", 100.0, spent)
    set_budget(profiled, {"account": "rollouts", "amount": 36.0})
    assert allocate(profiled, "plain").returncode == 0
    refused = allocate(profiled, "r")
    assert refused.returncode != 0
    assert "is 36 of rollouts, and the profile, which recipe 'r' reads, took 36" in refused.output


def set_budget(layout: Layout, budget: dict[str, Any]) -> None:
    path = layout.root / "params.yaml"
    values = yaml.safe_load(path.read_text())
    values["experiment"]["budget"] = budget
    path.write_text(yaml.safe_dump(values))
