"""The kept rollouts of a group: PODS against brute force and its published figures, and its
controls."""

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.train.methods.advantage import grpo_sample
from tasks.train.methods.select import max_reward, pods
from tasks.train.methods.select import random as random_select
from tests.train.steps import rollouts_of

RNG = np.random.default_rng(0)


def kept_of(module: Any, rewards: Any, groups: Any, rng: Any = RNG, **settings: Any) -> Any:
    """[B] Return the rollouts that a selector keeps, given these rewards."""
    method = module.Method(module.Settings(**settings)) if settings else module.Method()
    return method(rollouts_of(rewards, groups), rng)


rewards = st.one_of(
    st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=10),
    st.lists(st.sampled_from([0.0, 0.1, 0.5, 1.0, -2.0]), min_size=1, max_size=10),
    st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=10),
)


@given(rewards, st.integers(1, 10))
def test_pods_finds_the_largest_variance_of_all_subsets(values: list[float], keep: int) -> None:
    rewards_B = np.array(values)
    kept = kept_of(pods, rewards_B, np.zeros(len(values), dtype=np.int64), keep=keep)
    assert kept.sum() == min(keep, len(values))
    largest_reward = max(
        np.var(subset) for subset in itertools.combinations(values, min(keep, len(values)))
    )
    assert np.var(rewards_B[kept]) == pytest.approx(largest_reward, rel=1e-6, abs=1e-6)


@pytest.mark.parametrize(
    ("ones", "kept", "variance"),
    [(1, 1, 0.058594), (4, 4, 0.1875), (8, 8, 0.25), (32, 8, 0.25), (60, 12, 0.1875)],
)
def test_pods_of_64_binary_rewards_keeps_16(ones: int, kept: int, variance: float) -> None:
    rewards_B = np.random.default_rng(ones).permutation(np.repeat([1.0, 0.0], [ones, 64 - ones]))
    chosen = rewards_B[kept_of(pods, rewards_B, np.zeros(64, dtype=np.int64), keep=16)]
    assert chosen.sum() == kept
    assert np.var(chosen) == pytest.approx(variance, abs=1e-6)


def test_advantages_on_the_kept_set_and_on_the_pool() -> None:
    even = np.repeat([1.0, 0.0], 8)
    one = np.zeros(16, dtype=np.int64)
    np.testing.assert_allclose(
        grpo_sample.advantage(even, one, epsilon=1e-4)[[0, 8]], [0.96806, -0.96806], atol=1e-5
    )
    single = np.concatenate([[1.0], np.zeros(63)])  # a single success of 64, of which 16 are kept
    group = np.zeros(64, dtype=np.int64)
    kept = kept_of(pods, single, group, keep=16)
    assert kept[0]
    np.testing.assert_allclose(
        grpo_sample.advantage(single[kept], group[kept], epsilon=1e-4)[[0, 1]],
        [3.75, -0.25],
        atol=2e-3,
    )
    np.testing.assert_allclose(
        grpo_sample.advantage(single, group, epsilon=1e-4)[[0, 1]], [7.87, -0.125], atol=6e-3
    )


def test_dead_groups_have_no_advantage_without_epsilon() -> None:
    advantages = grpo_sample.advantage(
        np.array([1.0, 1.0, 1.0, 0.0]), np.array([0, 0, 1, 1]), epsilon=0.0
    )
    np.testing.assert_allclose(advantages, [0, 0, 0.5**0.5, -(0.5**0.5)])


@pytest.mark.parametrize(
    ("rewards", "keep", "kept"),
    [
        # the two largest have no variance, but one of each has; of equal rewards, the last large
        # and the first small are taken
        ([1.0, 0.0, 1.0, 0.0], 2, [1, 2]),
        ([0.5] * 4, 2, [2, 3]),  # nothing is strictly better than the largest
        ([3.0, 1.0, 2.0, 0.0], 1, [0]),
    ],
)
def test_ties_follow_the_rule(rewards: list[float], keep: int, kept: list[int]) -> None:
    assert np.flatnonzero(kept_of(pods, rewards, [0] * 4, keep=keep)).tolist() == kept


def test_no_rollouts_of_dead_groups_are_updated() -> None:
    rewards_B = [0.1] * 3 + [1.0, 0.0, 0.0, 0.0] + [1.0] + [1.0, 0.0] + [0.0] * 4
    group_B = [0] * 3 + [1] * 4 + [3] + [4] * 2 + [6] * 4
    kept = kept_of(pods, rewards_B, group_B, keep=2, drop_dead=True)
    before = kept_of(pods, rewards_B, group_B, keep=2)
    assert np.bincount(group_B, kept).tolist() == [0, 2, 0, 0, 2, 0, 0]
    assert np.bincount(group_B, before).tolist() == [2, 2, 0, 1, 2, 0, 2]
    assert (kept <= before).all()


def test_the_controls_of_pods() -> None:
    rewards_B, group_B = np.array([0.2, 0.9, 0.1, 0.5, 0.9, 0.0]), np.array([0, 0, 0, 0, 0, 1])
    largest_reward = kept_of(max_reward, rewards_B, group_B, keep=3)
    assert np.flatnonzero(largest_reward).tolist() == [1, 3, 4, 5]
    drawn = [
        tuple(
            kept_of(random_select, rewards_B, group_B, np.random.default_rng(seed), keep=2).tolist()
        )
        for seed in range(50)
    ]
    assert {sum(kept[:5]) for kept in drawn} == {2}
    assert len(set(drawn)) == 10  # every pair of five comes up
