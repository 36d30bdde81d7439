"""Numbers that the papers on selectors, advantages and losses print, or that follow from their
rules."""

import dataclasses
import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from tasks.train.data.rollouts import Observed, Rollouts
from tasks.train.methods.advantage import (
    decoupled,
    efficient,
    min_variance,
    one_sided,
    poise,
    probe,
    rloo,
)
from tasks.train.methods.advantage import value_probe as values
from tasks.train.methods.loss import vcpo
from tasks.train.methods.select import contrast, f_tis
from tests.train.steps import observed_of, rollouts_of

RNG = np.random.default_rng


# --- POISE and the value probe: METHODS 5.9


def test_the_features_of_a_rollout_do_not_change_its_baseline() -> None:
    method = poise.Method(probe.Settings(-1, 4, 1.0, 0.9))
    before = observed_of(rollouts_of([1, 0, 0, 1], [0, 0, 1, 1], [4] * 4))
    method.observe(before)
    advantages = method(before)
    assert before.observed is not None
    assert before.observed.hidden_ND is not None
    hidden_ND = before.observed.hidden_ND.copy()
    hidden_ND[:4] += 5.0  # the first rollout
    moved = dataclasses.replace(
        before, observed=dataclasses.replace(before.observed, hidden_ND=hidden_ND)
    )
    found = method(moved)
    assert found[0] == advantages[0]
    assert found[1] != advantages[1]
    np.testing.assert_array_equal(found[2:], advantages[2:])


def test_baselines_that_predict_the_reward_reduce_the_variance() -> None:
    """The hidden state predicts rewards: at most a third of the variance remains, while the group's
    mean would not reduce it."""
    rng = RNG(0)
    settings = probe.Settings(layer=-1, dimensions=8, ridge=0.1, memory=0.95)
    lam_1 = values.Settings(layer=-1, dimensions=8, ridge=0.1, memory=0.95)
    for method in (values.Method(lam_1), poise.Method(settings)):
        left = []
        for step in range(30):
            solved_Q = rng.integers(0, 2, 16).astype(float)  # a prompt is solved always or never
            rewards = np.repeat(solved_Q, 2)
            rollouts = observed_of(rollouts_of(rewards.tolist(), np.repeat(range(16), 2).tolist()))
            signal = np.column_stack([rewards, 1 - rewards, np.ones(32)])
            noise = 0.05 * rng.standard_normal((32, 3))
            seen = Observed(np.zeros(32), np.zeros(32), signal + noise, signal + noise)
            rollouts = dataclasses.replace(rollouts, observed=seen)
            advantages = method(rollouts)
            if step > 5:
                left.append(advantages.var() / 0.25)
            method.observe(rollouts)
        assert np.mean(left) < 1 / 3


@pytest.mark.parametrize(
    ("lam", "expected"),
    [(0.95, [0.77025, 0.495, 0.1]), (0.0, [0.3, 0.4, 0.1]), (1.0, [0.8, 0.5, 0.1])],
)
def test_generalised_advantages_along_a_completion(lam: float, expected: list[float]) -> None:
    """Values .2, .5 and .9 of a rollout of reward 1, before a rollout of one token and reward 0."""
    errors_N, row_N = 1.0 - np.array([0.2, 0.5, 0.9, 1.3]), np.array([0, 0, 0, 4])
    found = values.generalised(errors_N, row_N, lam)
    np.testing.assert_allclose(found, [*expected, -0.3])


def test_an_environments_tokens_are_not_steps_of_the_policy() -> None:
    """The advantages equal those without them, and lambda 1 gives the plain error."""
    rollouts = observed_of(rollouts_of([1.0, 0.0], [0, 0], [5, 2]))
    rollouts = rollouts.with_columns(is_action=[[True, False, False, True, True], [True, True]])
    own_N = rollouts.trained_N()

    def advantages(lam: float, seen: Rollouts) -> np.ndarray:
        method = values.Method(values.Settings(-1, 4, 1.0, 0.9, lam))
        method.observe(rollouts)
        return np.asarray(method(seen))

    assert rollouts.observed is not None
    short = dataclasses.replace(
        rollouts_of([1.0, 0.0], [0, 0], [3, 2]),
        observed=rollouts.observed.take(np.arange(2), np.flatnonzero(own_N)),
    )
    np.testing.assert_allclose(advantages(0.9, rollouts)[own_N], advantages(0.9, short))
    plain, last = advantages(1.0, rollouts), [4, 6]
    np.testing.assert_array_equal(advantages(0.9, rollouts)[last], plain[last])
    assert not np.allclose(advantages(0.9, short), plain[own_N])
    method = values.Method(values.Settings(-1, 4, 1.0, 0.9))
    method.observe(rollouts)
    predicted = probe.predict(method.state, method.rows(rollouts), 1.0)
    np.testing.assert_array_equal(plain, rollouts.rewards_B[rollouts.owner_N()] - predicted)


# --- VCPO: METHODS 7.2


@pytest.mark.parametrize(
    ("weights", "factor"),
    [([1, 1, 1, 1], 1.0), ([4, 0, 0, 0], 0.5), ([2, 1, 0.5, 0.5], 0.8528), ([8, *[1] * 7], 0.6294)],
)
def test_vcpo_scales_the_rate_by_the_effective_sample_size(
    weights: list[float], factor: float
) -> None:
    method = vcpo.Method(vcpo.Settings(base=1.0, power=0.5, normalize="token"))
    with np.errstate(divide="ignore"):
        log_weights_B = np.log(np.array(weights, dtype=np.float64))
    assert method.rate_factor(log_weights_B, 1.0, 0) == pytest.approx(factor, abs=5e-5)
    assert method.rate_factor(log_weights_B - 5000.0, 1.0, 0) == pytest.approx(factor, abs=5e-5)


@given(st.lists(st.floats(0.1, 5.0), min_size=3, max_size=8))
def test_min_variance_has_the_baseline_of_the_least_variance(weights: list[float]) -> None:
    weights_B, rewards_B = np.array(weights), np.arange(len(weights)) % 2.0
    group_B = np.zeros(len(weights), dtype=np.int64)
    advantages_B = min_variance.advantage(rewards_B, group_B, weights_B)
    baseline = float((rewards_B - advantages_B)[0])

    def spread(b: float) -> float:
        return float((weights_B**2 * (rewards_B - b) ** 2).sum())

    assert spread(baseline) <= min(spread(baseline + d) for d in (-0.01, 0.01)) + 1e-12


# --- F-TIS: METHODS 7.6


def test_f_tis_drops_distant_rollouts_without_a_gain() -> None:
    choose = f_tis.Method(f_tis.Settings(limit=1.0))
    rollouts = rollouts_of([1, 0, 1, 0], [0, 0, 1, 1], [3] * 4)
    sampler_N = np.zeros(12)

    def kept(logprobs_N: np.ndarray) -> list[bool]:
        observed = Observed(logprobs_N, np.zeros(12))
        return choose(dataclasses.replace(rollouts, observed=observed), RNG(0)).tolist()

    assert kept(sampler_N) == [True] * 4  # the same policy
    far_N = sampler_N.copy()
    far_N[:6] += 1.0  # both rollouts of the first group: 3 tokens of e - (e - 1) = 1 nat each
    assert kept(far_N) == [True, False, True, True]


# --- per-part normalisation, lengths


def test_the_sum_of_parts_divided_by_its_deviation_over_the_step() -> None:
    """A dead group, one success of four, and one failure of four: 8 of 12 have variance 1."""
    rewards = [1.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0, *[0.5] * 4]
    rollouts = rollouts_of(rewards, [0] * 4 + [1] * 4 + [2] * 4)
    found = decoupled.Method(decoupled.Settings({"a": 7.0}, batch=True))(rollouts)
    root, third = 4.5**0.5, 0.5**0.5
    expected = [root, *[-third] * 3, *[third] * 3, -root, *[0.0] * 4]
    np.testing.assert_allclose(found, expected)
    opposite = [json.dumps({"a": 0.1 * reward, "b": 0.3 - reward}) for reward in rewards]
    contrary = rollouts.with_columns(scores=opposite)
    halves = decoupled.Settings({"a": 0.5, "b": 0.5}, batch=True)
    assert decoupled.Method(halves)(contrary).tolist() == [0.0] * 12


def test_short_correct_answers_have_larger_advantages() -> None:
    method = efficient.Method(efficient.Settings(strength=0.2))
    mixed = method(rollouts_of([1, 1, 0], [0] * 3, [2, 6, 4]))
    assert mixed[0] > mixed[1] > 0 > mixed[2]
    easy = method(rollouts_of([1, 1, 1], [0] * 3, [2, 4, 6]))
    assert easy[0] > easy[1] > easy[2]
    assert method(rollouts_of([1, 1], [0] * 2, [5, 5])).tolist() == [0.0, 0.0]
    own = [[True] * 2, [True, False, False, True]]  # the environment's tokens do not count
    spoken = rollouts_of([1, 1], [0] * 2, [2, 4]).with_columns(is_action=own)
    assert method(spoken).tolist() == [0.0, 0.0]
    plain = efficient.Method(efficient.Settings(strength=0.0))
    rollouts = rollouts_of([1, 0, 0, 1], [0, 0, 0, 1], [1, 2, 3, 4])
    np.testing.assert_array_equal(
        plain(rollouts), rloo.advantage(rollouts.rewards_B, rollouts.group_B)
    )


@pytest.mark.parametrize(
    ("rewards", "lengths", "kept"),
    [
        ([1, 1, 1, 0, 0, 0], [5, 2, 9, 4, 7, 1], [0, 1, 3, 4]),
        ([1, 0, 0, 0, 0, 0], [5, 2, 9, 4, 7, 1], [0, 2, 3, 4]),
        ([1, 1, 1, 1, 1, 1], [5, 2, 9, 4, 7, 1], [0, 1, 3, 5]),
    ],
)
def test_contrast_keeps_the_shortest_correct_and_the_longest_wrong(
    rewards: list[float], lengths: list[int], kept: list[int]
) -> None:
    rollouts: Rollouts = rollouts_of(rewards, [0] * 6, lengths)
    choose = contrast.Method(dataclasses.replace(contrast.EXAMPLE, keep=4))
    assert np.flatnonzero(choose(rollouts, RNG(0))).tolist() == kept


# --- edge cases


def test_a_group_of_tiny_weights_keeps_its_baseline() -> None:
    method = min_variance.Method()
    rollouts = observed_of(rollouts_of([1, 0, 1, 0], [0, 0, 1, 1], [3] * 4))
    assert rollouts.observed is not None
    logprobs_N = np.repeat([0.0, 0.0, -400.0, -401.0], 3) / 3
    both = dataclasses.replace(rollouts.observed, logprobs_N=logprobs_N)
    found = method(dataclasses.replace(rollouts, observed=both))
    alone = method(dataclasses.replace(rollouts, observed=both).take(np.array([2, 3])))
    np.testing.assert_allclose(found[2:], alone)
    assert found[3] < -0.1


def test_a_nonfinite_row_does_not_affect_the_probe() -> None:
    state = probe.new_state(2)
    rows = np.array([[1.0, 1.0], [np.inf, 1.0], [2.0, 1.0]])
    probe.learn(state, rows, np.array([0.0, 1.0, 1.0]), 0.9)
    assert np.isfinite(probe.predict(state, rows[::2], 1.0)).all()


# --- One-sided updates: METHODS 13.17


def of_outcomes(num_correct: int, size: int) -> Rollouts:
    return rollouts_of([1.0] * num_correct + [0.0] * (size - num_correct), [0] * size)


@pytest.mark.parametrize(
    ("size", "rate", "cost", "shrink"),
    [
        (4, 0.25, np.inf, 0.86),
        (8, 0.25, np.inf, 0.942),
        (8, 0.5, np.inf, 0.7266),
        # groups with four correct rollouts are two-sided, so the one-sided formula does not apply
        (8, 0.5, 3.0, 0.7656),
        (4, 0.25, 3.0, 0.8125),
    ],
)
def test_one_sided_updates_only_scale_the_expected_gradient(
    size: int, rate: float, cost: float, shrink: float
) -> None:
    """A prompt with one logit: its score is r - p, and the gradient of its pass rate p (1 - p)."""
    method = one_sided.Method(one_sided.Settings(update_cost=cost))
    expected = 0.0
    for num in range(size + 1):
        rewards = np.array([1.0] * num + [0.0] * (size - num))
        gain = float((method(of_outcomes(num, size)) * (rewards - rate)).mean())
        expected += float(stats.binom.pmf(num, size, rate)) * gain
    assert expected / (rate * (1 - rate)) == pytest.approx(shrink, abs=0.006)


def test_one_sided_advantages_by_hand() -> None:
    method = one_sided.Method(one_sided.Settings(update_cost=3.0))
    assert method(of_outcomes(1, 4)).tolist() == [1, 0, 0, 0]
    assert method(of_outcomes(3, 4)).tolist() == [0, 0, 0, -1]
    assert method(of_outcomes(2, 4)) == pytest.approx(rloo.Method()(of_outcomes(2, 4)))
    always = one_sided.Method(one_sided.Settings(update_cost=float("inf")))
    assert always(of_outcomes(2, 4)).tolist() == [1, 1, 0, 0]
    never = one_sided.Method(one_sided.Settings(update_cost=0.0))
    assert never(of_outcomes(1, 4)) == pytest.approx(rloo.Method()(of_outcomes(1, 4)))


def test_the_divergence_excludes_tokens_of_an_environment() -> None:
    """The sampler's log-probability of these tokens is 0, and the policy's is arbitrary."""
    rollouts = observed_of(rollouts_of([1.0, 0.0], [0, 0], [4, 4]))
    assert rollouts.observed is not None
    own_N = np.array([True, False, False, True] * 2)
    logprobs = [[-0.5, 0.0, 0.0, -0.5]] * 2
    seen_N = np.where(own_N, -0.5, -9.0)
    observed = dataclasses.replace(rollouts.observed, logprobs_N=seen_N)
    marked = dataclasses.replace(rollouts, observed=observed).with_columns(
        logprobs=logprobs, is_action=own_N.reshape(2, 4).tolist()
    )
    assert f_tis.divergence(marked).tolist() == [0.0, 0.0]
    unmarked = marked.with_columns(is_action=None)
    assert (f_tis.divergence(unmarked) > 1.0).all()
    norms = dataclasses.replace(observed, gradient_norms_B=np.array([1.0, 1.0]))
    equal = dataclasses.replace(marked, observed=norms)
    assert min_variance.Method()(equal).tolist() == [0.5, -0.5]
