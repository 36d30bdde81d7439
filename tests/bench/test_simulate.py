"""The parts of the simulation that could be wrong without showing."""

import itertools
from pathlib import Path

import numpy as np
import pytest

from tasks.common import params, recipes
from tasks.train.settings import BatchSettings
from tests.bench.histories import World, read_world, take_profile
from tests.bench.simulate import Tally, oracle, replay
from tests.bench.world import PROJECT

BATCH = BatchSettings("rollouts", 32, "generated")


def world(*rates):
    """Prompts of these pass rates at every epoch; wrong completions are of 20 tokens, correct ones
    of 5."""
    return World(np.array([rates] * 3), np.full(len(rates), 10), (np.array([20]), np.array([5])))


def recipe(name, **train):
    found = recipes.recipe(params.load(PROJECT / "params.yaml"), name)
    return found | {"train": {**found["train"], **train}}


def test_the_oracle_is_the_best_of_all_choices():
    rates = np.array([0.5, 0.1, 0.3])

    def worth(sizes):
        return sum(1 - p**g - (1 - p) ** g for p, g in zip(rates, sizes, strict=True) if g)

    choices = list(itertools.product([0, *range(2, 24)], repeat=3))
    for budget in range(2, 23):
        best = max(worth(sizes) for sizes in choices if sum(sizes) <= budget)
        next_best = max(worth(sizes) for sizes in choices if sum(sizes) <= budget + 1)
        assert best - 1e-12 <= oracle(rates, budget) <= next_best + 1e-12
    assert oracle(rates, 1000) == pytest.approx(worth([32, 32, 32]))


def test_prompts_that_are_always_or_never_solved_give_no_mixed_group():
    found = replay(world(0.0, 1.0, 0.0), recipe("grpo"), BATCH, 0, first=0, passes=2, profiled=0)
    assert sorted(found) == [0, 1]
    assert (
        found[0]
        == found[1]
        == Tally(groups=3, rollouts=24, tokens=3 * 8 * 10 + 16 * 20 + 8 * 5, tokens_kept=600)
    )
    assert found[0].charged == 600


def test_mixed_groups_and_spread_come_at_their_rates():
    found = replay(world(*[0.5] * 400), recipe("grpo"), BATCH, 0, first=0, passes=2, profiled=0)
    total = found[0] + found[1]
    assert total.mixed / total.groups == pytest.approx(1 - 2 * 0.5**8, abs=0.01)
    assert total.spread / total.groups == pytest.approx(7 * 0.25, abs=0.05)  # (G - 1) p (1 - p)
    assert total.mixed / total.oracle == pytest.approx(1, abs=0.01)


def test_only_what_select_keeps_is_charged_as_updated_and_profiling_to_whom_it_serves():
    found = replay(world(*[0.5] * 50), recipe("pods"), BATCH, 0, first=1, passes=1, profiled=0)
    assert list(found) == [1]
    assert (found[1].rollouts, found[1].tokens_profiled) == (50 * 16, 0)
    assert 0.2 < found[1].tokens_kept / found[1].tokens < 0.3
    sgpo = replay(world(*[0.5] * 50), recipe("sgpo"), BATCH, 0, first=0, passes=1, profiled=0)[0]
    profile = take_profile(world(*[0.5] * 50), 0, np.random.default_rng([0, 0, 1]))
    assert sgpo.tokens_profiled == 50 * 8 * 10 + profile["completion_tokens"].sum()
    assert sgpo.charged == pytest.approx(sgpo.tokens + sgpo.tokens_profiled / 4)


def test_a_controller_sees_what_came_out():
    rates = [0.0] * 40 + [0.5] * 10
    greso = replay(world(*rates), recipe("greso"), BATCH, 0, first=0, passes=3, profiled=0)
    assert greso[0].groups == 50
    assert greso[2].groups < 40  # dead prompts were skipped


def test_equal_seeds_replay_equally():
    one, two, other = (
        replay(
            world(*np.linspace(0, 1, 30)),
            recipe("sagc"),
            BATCH,
            seed,
            first=0,
            passes=2,
            profiled=0,
        )
        for seed in (0, 0, 1)
    )
    assert one == two != other


@pytest.mark.real_data
def test_the_record_is_read(real_data: Path):
    as_recorded, smooth = read_world(real_data, 1), read_world(real_data, 5)
    assert as_recorded.pass_rates.shape == smooth.pass_rates.shape == (44, 605)
    assert set(np.unique(as_recorded.pass_rates * 8)) == set(range(9))
    assert as_recorded.pass_rates[0].mean() == pytest.approx(0.3428, abs=1e-4)
    assert smooth.pass_rates[10] == pytest.approx(as_recorded.pass_rates[8:13].mean(axis=0))
    wrong, correct = smooth.completion_tokens
    assert (len(wrong), len(correct)) == (49, 351)
    assert wrong.mean() > 1.4 * correct.mean()
