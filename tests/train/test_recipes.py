"""Every recipe of params.yaml names methods that exist, with all their settings and values of the
right types."""

import numpy as np
import polars as pl
import pytest

from tasks.allocate.planning import load_strategy, make_plan
from tasks.common import recipes
from tasks.common.artifacts import PROMPTS, SAMPLES
from tasks.train.loading import load_slots, train_settings
from tasks.train.plan import read_plan
from tasks.train.profile import Profile
from tasks.train.rollouts import Prompts
from tests.allocate.test_allocate import profile_of
from tests.parameters import every_value
from tests.train.steps import observed_of, prompts_of, requested, rollouts_of

VALUES = every_value()


@pytest.mark.parametrize("name", recipes.names(VALUES))
def test_a_recipe_can_be_planned_and_loaded(name: str) -> None:
    recipe = recipes.recipe(VALUES, name)
    allocation = load_strategy(recipe["allocate"])[1](
        profile_of([(k % 9, 8) for k in range(200)]), 2, np.random.default_rng(0)
    )
    plan = make_plan(allocation.phases, profile_of([(k % 9, 8) for k in range(200)]))
    settings = train_settings(VALUES, name)
    ids = pl.Series([f"p{k:05d}" for k in range(200)])
    profile = Profile(SAMPLES.frame([]), Prompts(PROMPTS.frame([]), lambda rows: []))
    slots = load_slots(
        settings, read_plan(plan, ids, settings.batch), prompts_of(len(ids)), profile
    )
    request = requested(slots.control)
    assert request.counts.sum() >= 1
    rollouts = observed_of(rollouts_of([1.0, 0.0, 1.0], [0, 0, 0]))
    assert slots.select(rollouts, np.random.default_rng(0)).any()
