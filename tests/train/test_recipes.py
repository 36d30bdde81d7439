"""Every recipe of params.yaml names methods that exist, with all their settings and values of the
right types."""

from pathlib import Path

import numpy as np
import pytest

from tasks.allocate.plan import load_strategy, make_plan
from tasks.common import params
from tasks.train.settings import TrainSettings
from tasks.train.slots import load_slots
from tests.allocate.test_allocate import profile_of

VALUES = params.load(Path(__file__).resolve().parents[2] / "params.yaml")


@pytest.mark.parametrize("name", VALUES["recipes"])
def test_a_recipe_can_be_planned_and_loaded(name: str) -> None:
    recipe = params.recipe(VALUES, name)
    allocation = load_strategy(recipe["allocate"])[1](
        profile_of([(k % 9, 8) for k in range(200)]), 2, np.random.default_rng(0)
    )
    plan = make_plan(allocation.phases, profile_of([(k % 9, 8) for k in range(200)]))
    settings = params.parse(recipe["train"], TrainSettings, "train")
    slots = load_slots(settings)
    columns = {name: plan[name].to_numpy() for name in ("phase", "pass", "group_size")}
    state = slots.start_control({**columns, "prompt_row": np.arange(len(plan))}, settings.batch)
    request = slots.control.next(state, [], np.random.default_rng(0))
    assert request.counts.sum() >= 1
    slots.start_generate(200)
    assert slots.select(
        np.array([1.0, 0.0, 1.0]), np.zeros(3, dtype=np.int64), np.random.default_rng(0)
    ).any()
