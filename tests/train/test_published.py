"""Numbers that the papers on controls and replay print, or that follow from their rules."""

from typing import Any

import numpy as np
import pytest

from tasks.train.data.rollouts import Rollouts
from tasks.train.methods.control import dars, dots, dps
from tasks.train.methods.replay import coverage, recent
from tasks.train.settings import BatchSettings
from tests.train.steps import (
    START,
    after,
    answer_to,
    merge_requests,
    passes_of,
    plan_of,
    requested,
    rollouts_of,
)

RNG = np.random.default_rng


# --- DARS: METHODS 5.1


@pytest.mark.parametrize(
    ("schedule", "standardised", "largest", "expected"),
    [
        ("equal", False, 32, [24, 11, 3, 1, 0, 0, 0, 0, 0]),
        ("hard", False, 64, [56, 24, 8, 3, 0, 0, 0, 0, 0]),
        ("equal", True, 99, [9, 5, 2, 1, 0, 0, 0, 0, 0]),
        ("hard", True, 99, [23, 14, 6, 3, 0, 0, 0, 0, 0]),
    ],
)
def test_dars_adds_the_published_rollouts_to_hard_prompts(
    schedule: Any, standardised: bool, largest: int, expected: list[int]
) -> None:
    method = dars.Method(dars.Settings(schedule, standardised, largest), plan_of([(0, 8)]))
    assert [method.extra(correct, 8) for correct in range(9)] == expected


def test_dars_extends_the_groups_of_its_first_stage() -> None:
    plan = plan_of([(0, 8)] * 3, BatchSettings("rollouts", 24, "generated"))
    method = dars.Method(dars.Settings("hard", standardised=False, largest=64), plan)
    first = requested(method)
    answered = answer_to(first, [1] * 8 + [1] + [0] * 7 + [1, 1] + [0] * 6)
    second = requested(method, 0, after(answered))
    assert second.extends is not None
    assert (second.extends.tolist(), second.counts.tolist()) == ([1, 2], [24, 8])
    merged = merge_requests([answered, answer_to(second)], [first.groups(0), second.groups(3)])
    assert np.bincount(merged.group_B).tolist() == [8, 32, 16]
    assert (np.diff(merged.group_B) >= 0).all()
    assert merged.prompt_rows_Q.tolist() == [0, 1, 2]
    assert np.bincount(merged.group_B, merged.rewards_B).tolist() == [8, 1, 2]


# --- DPS: METHODS 5.4


@pytest.mark.parametrize(
    ("memory", "expected"),
    [
        (
            1.0,
            [(0.4, 0.3, 0.3), (0.5385, 0.2308, 0.2308), (0.4, 0.3, 0.3), (0.3077, 0.4615, 0.2308)],
        ),
        (
            0.7,
            [
                (0.4, 0.3, 0.3),
                (0.5276, 0.2362, 0.2362),
                (0.3678, 0.3161, 0.3161),
                (0.2708, 0.4861, 0.2431),
                (0.3226, 0.4007, 0.2767),  # after a step without the prompt
            ],
        ),
    ],
)
def test_dps_predicts_the_published_states(memory: float, expected: list[Any]) -> None:
    plan = passes_of(2, 4, 20, BatchSettings("prompts", 1, "generated"))
    method = dps.Method(dps.Settings(memory, candidates=2), plan)
    group_rewards = [[0, 0, 0, 0], [0, 0, 0, 0], [1, 0, 0, 0], [1, 1, 1, 0]]
    for rewards, belief in zip([*group_rewards, None], expected, strict=False):
        row = 0 if rewards else 1
        rewards = rewards or [1, 1, 1, 1]
        method.observe(rollouts_of(rewards, [0] * 4, prompt_rows=[row]))
        found = dps.predict(method.state.counts, method.state.beliefs)[0]
        np.testing.assert_allclose(found, belief, atol=5e-5)


def test_dps_prefers_prompts_expected_to_be_mixed_and_spends_its_budget() -> None:
    plan = passes_of(40, 4, 2, BatchSettings("prompts", 4, "generated"))
    method = dps.Method(dps.Settings(0.9, candidates=10), plan)
    taken = np.zeros(40, dtype=np.int64)
    while request := method.next(START, RNG(int(taken.sum()))):
        taken[request.prompt_rows] += 1
        mixed = [1.0, 0, 0, 0]
        rewards = [r for row in request.prompt_rows for r in (mixed if row < 10 else [0.0] * 4)]
        method.observe(answer_to(request, rewards))
    assert 4 * taken.sum() == plan.num_rollouts()
    assert taken[:10].mean() > 2 * taken[10:].mean()


# --- DOTS and its replay: METHODS 5.5


def test_dots_prefers_pass_rates_near_one_half() -> None:
    plan = passes_of(30, 8, 10, BatchSettings("prompts", 5, "generated"))
    method = dots.Method(dots.Settings(temperature=0.02, memory=0.9), plan)
    rates, taken = np.repeat([0.0, 0.5, 1.0], 10), np.zeros(30, dtype=np.int64)
    while request := method.next(START, RNG(int(taken.sum()))):
        taken[request.prompt_rows] += 1
        rewards = [float(k < 8 * rates[row]) for row in request.prompt_rows for k in range(8)]
        method.observe(answer_to(request, rewards))
    assert taken.min() > 0  # every prompt is sampled
    assert taken[10:20].mean() > 3 * taken[:10].mean()
    assert taken[10:20].mean() > 3 * taken[20:].mean()


def test_replay_draws_its_share_from_the_latest_mixed_groups() -> None:
    method = recent.Method(recent.Settings(share=0.5, capacity=3))
    batch = BatchSettings("rollouts", 8, "generated")
    for version, rows in enumerate(([0, 1], [2, 3], [0, 4])):
        step = rollouts_of([1, 0, 1, 0], [0, 0, 1, 1], [3, 1, 2, 2], prompt_rows=rows)
        method.add(step.with_columns(versions=[[version]] * 4))
        method.add(rollouts_of([1, 1], [0, 0], prompt_rows=[9]))  # dead, so not stored
    assert method.state.rollouts.prompt_rows_Q.tolist() == [3, 0, 4]
    assert method.room(batch) == 4
    assert method.room(BatchSettings("prompts", 8, "generated")) == 3  # the buffer is full
    drawn = method.draw(RNG(0), 4, batch)
    assert drawn is not None
    assert np.bincount(drawn.group_B).tolist() == [2, 2]
    assert set(drawn.versions_B[drawn.prompt_rows_Q[drawn.group_B] == 0]) <= {2}


def test_ungraded_groups_do_not_change_a_pass_rate() -> None:
    method = dots.Method(dots.Settings(), passes_of(2, 8, 1))
    method.observe(rollouts_of([0.0] * 8, [0] * 8, prompt_rows=[0]))
    before = method.pass_rates().tolist()
    method.observe(rollouts_of([0.0] * 8, [0] * 8, prompt_rows=[0], errors=8))
    assert method.pass_rates().tolist() == before


def test_a_prompt_with_two_groups_in_a_step_is_stored_once() -> None:
    method = recent.Method(recent.Settings())
    method.add(rollouts_of([1, 0, 0, 1], [0, 0, 1, 1], [1, 1, 2, 2], prompt_rows=[7, 7]))
    assert method.state.rollouts.prompt_rows_Q.tolist() == [7]
    assert method.state.rollouts.completion_tokens_B().tolist() == [2, 2]


# --- coverage


def groups_of(tokens: list[list[int]], prompt_rows: list[int]) -> Rollouts:
    """Return a mixed group for each completion, which is correct; the wrong ones are all equal."""
    both = [ids for correct in tokens for ids in (correct, [9, 9, 9, 9])]
    made = rollouts_of(
        [1.0, 0.0] * len(tokens),
        np.repeat(np.arange(len(tokens)), 2).tolist(),
        [len(ids) for ids in both],
        prompt_rows,
    )
    return made.with_columns(token_ids=both)


def test_similarity_by_hand() -> None:
    """Bigrams 12 23, and 23 34: they share one of three. A short run is a single gram."""
    rollouts = groups_of([[1, 2, 3], [2, 3, 4], [7]], [0, 1, 2])
    grams = coverage.grams_of(rollouts, 2)
    assert grams == [{(1, 2), (2, 3)}, {(2, 3), (3, 4)}, {(7,)}]
    np.testing.assert_allclose(
        coverage.likeness([*grams, set(), set()]),
        [
            [1, 1 / 3, 0, 0, 0],
            [1 / 3, 1, 0, 0, 0],
            [0, 0, 1, 0, 0],
            [0, 0, 0, 1, 1],
            [0, 0, 0, 1, 1],
        ],
    )
    own = [[True, False, True], [True] * 4] * 2 + [[True], [True] * 4]
    apart = coverage.grams_of(rollouts.with_columns(is_action=own), 2)
    assert apart[0] == {(1,), (3,)}  # no gram spans an environment's tokens


def test_coverage_keeps_dissimilar_groups() -> None:
    """Of three equal groups and a different one, it keeps the first and the different one."""
    method = coverage.Method(coverage.Settings(capacity=2, n=2))
    same = [1, 2, 3]
    method.add(groups_of([same, same], [0, 1]))
    assert method.state.rollouts.prompt_rows_Q.tolist() == [0, 1]  # both fit
    method.add(groups_of([[5, 6, 7], same], [2, 3]))
    assert method.state.rollouts.prompt_rows_Q.tolist() == [0, 2]
    method.add(groups_of([[5, 6, 8]], [2]))  # the latest group of a prompt
    assert method.state.rollouts.prompt_rows_Q.tolist() == [0, 2]
    assert method.state.rollouts.table["token_ids"].to_list()[2] == [5, 6, 8]
