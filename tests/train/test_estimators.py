"""Advantages and losses: hand-computed values, and properties over ragged groups."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tasks.train.advantage import grpo
from tasks.train.batch import mixed_groups
from tasks.train.loss import clip


@pytest.mark.parametrize(
    ("size", "table"),
    [(2, [1.0]), (4, [1.7321, 1.0, 0.5774]), (8, [2.6458, 1.7321, 1.2910, 1.0, 0.7746, 0.5774, 0.3780])],
)
def test_advantage_of_a_success_among_n(size: int, table: list[float]) -> None:
    for successes, expected in enumerate(table, start=1):
        rewards = np.array([1.0] * successes + [0.0] * (size - successes))
        advantages = grpo.advantage(rewards, np.zeros(size, dtype=np.int64))
        assert advantages[0] == pytest.approx(expected, abs=5e-5)


def test_ragged_groups_in_one_step() -> None:
    rewards = np.array([1, 0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 1.0])
    groups = np.array([0, 0, 0, 0, 1, 1, 1, 2, 2, 2, 2, 3])
    root = 3**0.5
    expected = [root, -1 / root, -1 / root, -1 / root, 0, 0, 0, root, -1 / root, -1 / root, -1 / root, 0]
    np.testing.assert_allclose(grpo.advantage(rewards, groups), expected)
    assert mixed_groups(rewards, groups, 4).tolist() == [True, False, True, False]


def test_equal_rewards_are_equal_whatever_their_size() -> None:
    """0.1 has no exact mean in binary: a threshold on the spread would call such a group mixed or not by luck."""
    advantages = grpo.advantage(np.full(7, 0.1), np.zeros(7, dtype=np.int64))
    assert (advantages == 0.0).all()
    tiny = np.array([0.0, 1e-12])
    np.testing.assert_allclose(grpo.advantage(tiny, np.zeros(2, dtype=np.int64)), [-1.0, 1.0])


groups = st.lists(st.lists(st.sampled_from([0.0, 0.25, 1.0]), min_size=1, max_size=9), min_size=1, max_size=8)


@given(groups, st.randoms(use_true_random=False))
def test_advantages_centre_scale_and_ignore_row_order(
    rewards: list[list[float]], random: "np.random.Generator"
) -> None:
    flat = np.array([reward for group in rewards for reward in group])
    group_B = np.repeat(np.arange(len(rewards)), [len(group) for group in rewards])
    advantages = grpo.advantage(flat, group_B)
    for index, group in enumerate(rewards):
        mine = advantages[group_B == index]
        assert mine.sum() == pytest.approx(0.0, abs=1e-9)
        assert (mine**2).mean() == pytest.approx(float(len(set(group)) > 1))
    order = np.array(random.sample(range(len(flat)), len(flat)))  # type: ignore[attr-defined]
    np.testing.assert_allclose(grpo.advantage(flat[order], group_B[order]), advantages[order], atol=1e-12)


def test_clip_by_hand() -> None:
    ratios = torch.tensor([[1.0, 1.5, 0.5, 9.9], [1.5, 0.5, 1.0, 9.9]], dtype=torch.float64)
    mask = torch.tensor([[True, True, True, False]] * 2)
    advantages = torch.tensor([2.0, -1.0], dtype=torch.float64)
    loss, stats = clip.loss(ratios.log(), torch.zeros(2, 4), advantages, mask, 6, clip_low=0.2, clip_high=0.3)
    # A = 2: 1, min(1.5, 1.3), min(.5, .8) -> 2 * (1 + 1.3 + .5);  A = -1: max(1.5, 1.3), max(.5, .8), 1 -> -(1.5+.8+1)
    assert loss.item() == pytest.approx(-(2 * 2.8 - 3.3) / 6)
    assert stats["clipped"].item() == 2


def test_on_policy_gradient_is_reinforce() -> None:
    """At ratio 1 the gradient of the loss is -A / N for every token, whatever the clips."""
    logprobs = torch.tensor([[-1.0, -2.0], [-0.5, -3.0]], requires_grad=True)
    mask = torch.tensor([[True, True], [True, False]])
    loss, _ = clip.loss(logprobs, logprobs.detach(), torch.tensor([1.5, -0.5]), mask, 5, clip_low=0.2, clip_high=0.28)
    loss.backward()
    np.testing.assert_allclose(logprobs.grad, [[-0.3, -0.3], [0.1, 0.0]], atol=1e-7)
