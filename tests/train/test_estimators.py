"""Advantages and losses: hand-computed values, and properties over ragged groups."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tasks.train.data.groups import centred_rewards, mixed_groups
from tasks.train.data.rollouts import StepTotals
from tasks.train.data.tokens import Tokens
from tasks.train.learner.correction import corrected_tokens
from tasks.train.methods.advantage import grpo, mc_grpo, rloo
from tasks.train.methods.loss import clip
from tasks.train.settings import Correction

CLIP = {"clip_low": 0.2, "ratio": "token", "normalize": "token"}


def loss_of(module: Any, *arrays: Any, **settings: Any) -> Any:
    return module.Method(module.Settings(**settings))(*arrays)


groups = st.lists(
    st.lists(st.sampled_from([0.0, 0.25, 1.0]), min_size=1, max_size=9), min_size=1, max_size=8
)


@given(groups, st.randoms(use_true_random=False))
def test_advantages_are_centred_scaled_and_independent_of_row_order(
    rewards: list[list[float]], random: "np.random.Generator"
) -> None:
    flat = np.array([reward for group in rewards for reward in group])
    group_B = np.repeat(np.arange(len(rewards)), [len(group) for group in rewards])
    advantages = grpo.advantage(flat, group_B)
    for index, group in enumerate(rewards):
        mine = advantages[group_B == index]
        assert mine.sum() == pytest.approx(0.0, abs=1e-9)
        assert (mine**2).mean() == pytest.approx(float(len(set(group)) > 1))
        assert (mine * (np.array(group) - np.mean(group)) >= 0.0).all()
    order = np.array(random.sample(range(len(flat)), len(flat)))  # type: ignore[attr-defined]
    np.testing.assert_allclose(
        grpo.advantage(flat[order], group_B[order]), advantages[order], atol=1e-12
    )


def tokens_of(
    logprobs: torch.Tensor, old: torch.Tensor, advantages: list[float], lengths: list[int]
) -> Tokens:
    """Return tokens of rollouts of these lengths, with an advantage per rollout and weight 1."""
    row_N = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
    gains = torch.tensor(advantages, dtype=logprobs.dtype)[row_N]
    return Tokens(logprobs, old, torch.ones_like(logprobs), gains, row_N, len(lengths))


def test_clip_by_hand() -> None:
    ratios = torch.tensor([1.0, 1.5, 0.5, 1.5, 0.5, 1.0], dtype=torch.float64)
    tokens = tokens_of(ratios.log(), torch.zeros_like(ratios), [2.0, -1.0], [3, 3])
    loss, stats = loss_of(clip, tokens, StepTotals(6, 2, 4), **CLIP, clip_high=0.3)
    # A = 2: 1, min(1.5, 1.3), min(.5, .8) -> 2 * (1 + 1.3 + .5)
    # A = -1: max(1.5, 1.3), max(.5, .8), 1 -> -(1.5 + .8 + 1)
    assert loss.item() == pytest.approx(-(2 * 2.8 - 3.3) / 6)
    assert stats["clipped"].tolist() == [False, True, False, False, True, False]
    halved = dataclasses.replace(tokens, weights_N=torch.full_like(ratios, 0.5))
    again, _ = loss_of(clip, halved, StepTotals(6, 2, 4), **CLIP, clip_high=0.3)
    assert again.item() == pytest.approx(loss.item() / 2)


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
    """Nine rollouts: as published, +-1000 for the minority and 0 for the majority; with a minimum
    deviation of 1, +-1."""
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


LOGPROBS = torch.tensor([-1.0, -2.0, -3.0, -0.5], dtype=torch.float64)
GAPS = torch.tensor([0.3, 0.0, -0.6, 0.1], dtype=torch.float64)
LENGTHS = [3, 1]


@pytest.mark.parametrize(
    ("normalize", "weights"),
    [
        ("token", [1 / 10, 1 / 10]),
        ("sequence", [1 / 3 / 4, 1 / 4]),
        ("constant", [1 / 4 / 8, 1 / 4 / 8]),
        ("prompt", [1 / 6 / 2, 1 / 4 / 2]),  # groups of 6 and 4 tokens, and one without tokens
    ],
)
def test_normalizations_by_hand(normalize: str, weights: list[float]) -> None:
    settings = {"clip_low": 9.0, "clip_high": 9.0, "ratio": "token", "normalize": normalize}
    tokens = tokens_of(LOGPROBS, LOGPROBS - GAPS, [2.0, -1.0], LENGTHS)
    tokens = dataclasses.replace(tokens, group_B=torch.tensor([0, 2]))
    totals = StepTotals(10, 4, 8, torch.tensor([12, 0, 8]))
    loss, _ = loss_of(clip, tokens, totals, **settings)
    first, second = np.exp([0.3, 0.0, -0.6]).sum() * 2, -np.exp(0.1)
    assert loss.item() == pytest.approx(-(first * weights[0] + second * weights[1]))


# --- differences of sampler and trainer


TRUNCATED = Correction(ratio_to="old", level="token", cap=1.2, mode="truncate")


def test_importance_weights_are_capped_and_have_no_gradient() -> None:
    """On-policy the loss is REINFORCE with truncated importance weights (TIS)."""
    logprobs = LOGPROBS.clone().requires_grad_()
    gains, row_N = torch.tensor([2.0, 2.0, 2.0, -1.0]), torch.tensor([0, 0, 0, 1])
    tokens, cut_N = corrected_tokens(
        logprobs, logprobs.detach(), LOGPROBS - GAPS, gains, row_N, 2, TRUNCATED
    )
    assert cut_N.tolist() == [True, False, False, False]
    loss, stats = loss_of(clip, tokens, StepTotals(4, 2, 3), **CLIP, clip_high=0.28)
    weights = np.array([1.2, 1.0, np.exp(-0.6), np.exp(0.1)])
    assert loss.item() == pytest.approx(-(weights * gains.numpy()).sum() / 4)
    assert not stats["clipped"].any()  # there is no staleness to clip
    loss.backward()
    np.testing.assert_allclose(logprobs.grad, -weights * gains.numpy() / 4)


def test_a_group_whose_rewards_differ_by_rounding_is_dead() -> None:
    rewards = np.array([0.1 + 0.2, 0.3, 0.3, 0.0, 1e-12])
    group_B = np.array([0, 0, 0, 1, 1])
    assert rewards[0] != rewards[1]
    assert mixed_groups(rewards, group_B, 2).tolist() == [False, True]
    for estimate in (centred_rewards, grpo.advantage, rloo.advantage):
        assert (estimate(rewards, group_B)[:3] == 0.0).all()
