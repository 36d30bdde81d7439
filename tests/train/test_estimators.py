"""Advantages and losses: hand-computed values, and properties over ragged groups."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tasks.train.methods.advantage import grpo, mc_grpo, rloo
from tasks.train.methods.loss import clip, tis
from tasks.train.rollouts import StepTotals, centred_rewards, mixed_groups

CLIP = {"clip_low": 0.2, "ratio": "token", "normalize": "token"}


def loss_of(module: Any, *arrays: Any, **settings: Any) -> Any:
    """The loss and its sums, with these settings."""
    return module.Method(module.Settings(**settings))(*arrays)


@pytest.mark.parametrize(
    ("size", "table"),
    [
        (2, [1.0]),
        (4, [1.7321, 1.0, 0.5774]),
        (8, [2.6458, 1.7321, 1.2910, 1.0, 0.7746, 0.5774, 0.3780]),
    ],
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
    expected = [
        root,
        -1 / root,
        -1 / root,
        -1 / root,
        0,
        0,
        0,
        root,
        -1 / root,
        -1 / root,
        -1 / root,
        0,
    ]
    np.testing.assert_allclose(grpo.advantage(rewards, groups), expected)
    assert mixed_groups(rewards, groups, 4).tolist() == [True, False, True, False]


def test_equal_rewards_are_equal_whatever_their_size() -> None:
    """0.1 has no exact mean in binary: a threshold on the spread would call such a group mixed or
    not by luck."""
    advantages = grpo.advantage(np.full(7, 0.1), np.zeros(7, dtype=np.int64))
    assert (advantages == 0.0).all()
    tiny = np.array([0.0, 1e-12])
    np.testing.assert_allclose(grpo.advantage(tiny, np.zeros(2, dtype=np.int64)), [-1.0, 1.0])


groups = st.lists(
    st.lists(st.sampled_from([0.0, 0.25, 1.0]), min_size=1, max_size=9), min_size=1, max_size=8
)


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
    np.testing.assert_allclose(
        grpo.advantage(flat[order], group_B[order]), advantages[order], atol=1e-12
    )


def test_clip_by_hand() -> None:
    ratios = torch.tensor([[1.0, 1.5, 0.5, 9.9], [1.5, 0.5, 1.0, 9.9]], dtype=torch.float64)
    mask = torch.tensor([[True, True, True, False]] * 2)
    advantages = torch.tensor([2.0, -1.0], dtype=torch.float64)
    loss, stats = loss_of(
        clip,
        ratios.log(),
        torch.zeros(2, 4),
        advantages,
        mask,
        StepTotals(6, 2, 4),
        **CLIP,
        clip_high=0.3,
    )
    # A = 2: 1, min(1.5, 1.3), min(.5, .8) -> 2 * (1 + 1.3 + .5);  A = -1: max(1.5, 1.3), max(.5,
    # .8), 1 -> -(1.5+.8+1)
    assert loss.item() == pytest.approx(-(2 * 2.8 - 3.3) / 6)
    assert stats["clipped"].item() == 2


def test_on_policy_gradient_is_reinforce() -> None:
    """At ratio 1 the gradient of the loss is -A / N for every token, whatever the clips."""
    logprobs = torch.tensor([[-1.0, -2.0], [-0.5, -3.0]], requires_grad=True)
    mask = torch.tensor([[True, True], [True, False]])
    loss, _ = loss_of(
        clip,
        logprobs,
        logprobs.detach(),
        torch.tensor([1.5, -0.5]),
        mask,
        StepTotals(5, 2, 2),
        **CLIP,
        clip_high=0.28,
    )
    loss.backward()
    np.testing.assert_allclose(logprobs.grad, [[-0.3, -0.3], [0.1, 0.0]], atol=1e-7)


RAGGED = (
    np.array([1, 0, 0, 0, 1, 1, 1, 1, 0, 0, 0, 1.0]),
    np.array([0, 0, 0, 0, 1, 1, 1, 2, 2, 2, 2, 3]),
)


def test_dr_grpo_and_rloo_by_hand() -> None:
    mean_left = [0.75, -0.25, -0.25, -0.25, 0, 0, 0, 0.75, -0.25, -0.25, -0.25, 0]
    np.testing.assert_allclose(centred_rewards(*RAGGED), mean_left)
    one, third = 1.0, -1 / 3
    np.testing.assert_allclose(
        rloo.advantage(*RAGGED), [one, third, third, third, 0, 0, 0, one, third, third, third, 0]
    )


@pytest.mark.parametrize("successes", range(1, 9))
def test_mc_grpo_with_binary_rewards_of_an_odd_group(successes: int) -> None:
    """Nine rollouts: as published +-1000 for the minority and 0 for the majority; with the cure
    +-1."""
    rewards, groups = (
        np.array([1.0] * successes + [0.0] * (9 - successes)),
        np.zeros(9, dtype=np.int64),
    )
    sign = np.where(rewards == 1, 1.0, 0.0) if successes <= 4 else np.where(rewards == 0, -1.0, 0.0)
    np.testing.assert_allclose(mc_grpo.advantage(rewards, groups, min_deviation=1e-3), 1000 * sign)
    np.testing.assert_allclose(mc_grpo.advantage(rewards, groups, min_deviation=1.0), sign)


def test_mc_grpo_with_real_rewards() -> None:
    rewards, groups = np.array([1.0, 4.0, 2.0, 9.0, 3.0, 5.0, 5.0]), np.array([0, 0, 0, 0, 0, 2, 2])
    # median 3, deviations 2 1 1 6 0, their median 1
    expected = [-2, 1, -1, 6, 0, 0, 0]
    np.testing.assert_allclose(mc_grpo.advantage(rewards, groups, min_deviation=0.001), expected)


MASK = torch.tensor([[True, True, True], [True, False, False]])
LOGPROBS = torch.tensor([[-1.0, -2.0, -3.0], [-0.5, 0.0, 0.0]], dtype=torch.float64)
OLD = LOGPROBS - torch.tensor([[0.3, 0.0, -0.6], [0.1, 0.0, 0.0]], dtype=torch.float64)
GAINS = torch.tensor([2.0, -1.0], dtype=torch.float64)


@pytest.mark.parametrize(
    ("normalize", "weights"),
    [
        ("token", [1 / 10, 1 / 10]),
        ("sequence", [1 / 3 / 4, 1 / 4]),
        ("constant", [1 / 4 / 8, 1 / 4 / 8]),
    ],
)
def test_normalizations_by_hand(normalize: str, weights: list[float]) -> None:
    loss, _ = loss_of(
        clip,
        LOGPROBS,
        OLD,
        GAINS,
        MASK,
        StepTotals(10, 4, 8),
        clip_low=9.0,
        clip_high=9.0,
        ratio="token",
        normalize=normalize,
    )
    first, second = np.exp([0.3, 0.0, -0.6]).sum() * 2, -np.exp(0.1)
    assert loss.item() == pytest.approx(-(first * weights[0] + second * weights[1]))


def test_sequence_ratio_is_gspos() -> None:
    """One ratio a rollout, exp of the mean log-ratio (-0.1 and 0.1); its gradient spreads over the
    tokens."""
    logprobs = LOGPROBS.clone().requires_grad_()
    settings = {"clip_low": 0.2, "clip_high": 0.2, "ratio": "sequence", "normalize": "sequence"}
    loss, stats = loss_of(clip, logprobs, OLD, GAINS, MASK, StepTotals(4, 2, 3), **settings)
    assert loss.item() == pytest.approx(-(2 * np.exp(-0.1) - np.exp(0.1)) / 2)
    assert stats["clipped"].item() == 0
    loss.backward()
    token = -2 * np.exp(-0.1) / 3 / 2
    np.testing.assert_allclose(logprobs.grad, [[token] * 3, [np.exp(0.1) / 2, 0, 0]])
    tight = {**settings, "clip_high": 0.05}
    _, stats = loss_of(clip, LOGPROBS, OLD, -GAINS, MASK, StepTotals(4, 2, 3), **tight)
    assert (
        stats["clipped"].item() == 1
    )  # the second rollout's single token, its ratio 1.105 above 1.05


def test_tis_weights_are_capped_and_carry_no_gradient() -> None:
    logprobs = LOGPROBS.clone().requires_grad_()
    loss, stats = loss_of(
        tis, logprobs, OLD, GAINS, MASK, StepTotals(4, 2, 3), cap=1.2, normalize="token"
    )
    weights = np.array([[1.2, 1.0, np.exp(-0.6)], [np.exp(0.1), 0, 0]])
    assert loss.item() == pytest.approx(-(2 * weights[0].sum() - weights[1].sum()) / 4)
    assert stats["clipped"].item() == 1
    loss.backward()
    np.testing.assert_allclose(logprobs.grad, [-2 * weights[0] / 4, weights[1] / 4])
