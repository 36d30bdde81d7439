"""Numbers that the papers behind the methods print, or that follow from their rules."""

import dataclasses
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from tasks.train.flat_rollouts import FlatRollouts
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
from tasks.train.methods.control import dars, dots, dps
from tasks.train.methods.loss import clip, vcpo
from tasks.train.methods.replay import recent
from tasks.train.methods.select import contrast, f_tis
from tasks.train.rollouts import Observed, Rollouts, StepTotals
from tasks.train.settings import BatchSettings
from tasks.train.tokens import Tokens
from tests.train.steps import (
    START,
    after,
    answer_to,
    merge_requests,
    observed_of,
    passes_of,
    plan_of,
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
def test_dars_gives_hard_prompts_the_published_extra(
    schedule: Any, standardised: bool, largest: int, expected: list[int]
) -> None:
    method = dars.Method(dars.Settings(schedule, standardised, largest), plan_of([(0, 8)]))
    assert [method.extra(correct, 8) for correct in range(9)] == expected


def test_dars_extends_the_groups_of_its_first_stage() -> None:
    plan = plan_of([(0, 8)] * 3, BatchSettings("rollouts", 24, "generated"))
    method = dars.Method(dars.Settings("hard", standardised=False, largest=64), plan)
    first = method.next(START, RNG(0))
    assert first is not None
    answered = answer_to(first, [1] * 8 + [1] + [0] * 7 + [1, 1] + [0] * 6)
    second = method.next(after(answered), RNG(0))
    assert second is not None
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
                (0.3226, 0.4007, 0.2767),  # a step that did not sample the prompt
            ],
        ),
    ],
)
def test_dps_predicts_the_published_states(memory: float, expected: list[Any]) -> None:
    plan = passes_of(2, 4, 20, BatchSettings("prompts", 1, "generated"))
    method = dps.Method(dps.Settings(memory, candidates=2), plan)
    shown = [[0, 0, 0, 0], [0, 0, 0, 0], [1, 0, 0, 0], [1, 1, 1, 0]]
    for rewards, belief in zip([*shown, None], expected, strict=False):
        row = 0 if rewards else 1
        rewards = rewards or [1, 1, 1, 1]
        method.observe(rollouts_of(rewards, [0] * 4, prompt_rows=[row]))
        found = dps.predict(method.state.counts, method.state.beliefs)[0]
        np.testing.assert_allclose(found, belief, atol=5e-5)


def test_dps_takes_the_prompts_that_it_expects_to_be_mixed_and_spends_its_budget() -> None:
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
    assert method.progress() == 1.0


# --- DOTS and its replay: METHODS 5.5


def test_dots_prefers_pass_rates_near_one_half() -> None:
    plan = passes_of(30, 8, 10, BatchSettings("prompts", 5, "generated"))
    method = dots.Method(dots.Settings(temperature=0.02, memory=0.9), plan)
    rates, taken = np.repeat([0.0, 0.5, 1.0], 10), np.zeros(30, dtype=np.int64)
    while request := method.next(START, RNG(int(taken.sum()))):
        taken[request.prompt_rows] += 1
        rewards = [float(k < 8 * rates[row]) for row in request.prompt_rows for k in range(8)]
        method.observe(answer_to(request, rewards))
    assert taken.min() > 0  # every prompt is tried
    assert taken[10:20].mean() > 3 * taken[:10].mean()
    assert taken[10:20].mean() > 3 * taken[20:].mean()


def test_replay_gives_its_share_of_mixed_groups_and_the_latest_of_a_prompt() -> None:
    method = recent.Method(recent.Settings(share=0.5, capacity=3))
    batch = BatchSettings("rollouts", 8, "generated")
    for version, rows in enumerate(([0, 1], [2, 3], [0, 4])):
        step = rollouts_of([1, 0, 1, 0], [0, 0, 1, 1], [3, 1, 2, 2], prompt_rows=rows)
        method.add(dataclasses.replace(step, versions_B=np.full(4, version)))
        method.add(rollouts_of([1, 1], [0, 0], prompt_rows=[9]))  # dead: not kept
    assert method.state.prompt_rows_G.tolist() == [3, 0, 4]
    assert method.room(batch) == 4
    drawn = method.draw(RNG(0), 4, batch)
    assert drawn is not None
    assert np.bincount(drawn.group_B).tolist() == [2, 2]
    assert set(drawn.versions_B[drawn.prompt_rows_Q[drawn.group_B] == 0]) <= {2}


groups = st.lists(st.lists(st.integers(1, 5), min_size=1, max_size=4), min_size=1, max_size=5)


@given(groups, st.randoms())
def test_a_buffer_gives_back_what_was_put_in(lengths: list[list[int]], random: Any) -> None:
    flat = [length for group in lengths for length in group]
    group_B = np.repeat(np.arange(len(lengths)), list(map(len, lengths))).tolist()
    rewards = [float(random.random() < 0.5) for _ in flat]
    rollouts = rollouts_of(rewards, group_B, flat)
    back = FlatRollouts.of(rollouts).rollouts()
    assert back.samples == rollouts.samples
    assert (back.prompts, back.outcomes) == (rollouts.prompts, rollouts.outcomes)
    np.testing.assert_array_equal(back.group_B, rollouts.group_B)
    np.testing.assert_array_equal(back.rewards_B, rollouts.rewards_B)
    chosen = np.array(random.sample(range(len(lengths)), random.randint(1, len(lengths))))
    part = FlatRollouts.of(rollouts).take(chosen).rollouts()
    assert part.completion_tokens_B().tolist() == [n for g in chosen for n in lengths[g]]


# --- POISE and the value probe: METHODS 5.9


def test_a_rollout_s_own_features_do_not_move_its_baseline() -> None:
    method = poise.Method(probe.Settings(-1, 4, 1.0, 0.9))
    before = observed_of(rollouts_of([1, 0, 0, 1], [0, 0, 1, 1], [4] * 4))
    method.observe(before)
    advantages = method(before)
    assert before.observed is not None
    assert before.observed.hidden_ND is not None
    hidden_ND = before.observed.hidden_ND.copy()
    hidden_ND[:4] += 5.0  # of the first rollout
    moved = dataclasses.replace(
        before, observed=dataclasses.replace(before.observed, hidden_ND=hidden_ND)
    )
    found = method(moved)
    assert found[0] == advantages[0]
    assert found[1] != advantages[1]
    np.testing.assert_array_equal(found[2:], advantages[2:])


def test_baselines_that_predict_the_reward_make_the_advantage_vary_less() -> None:
    """Rewards that the hidden state predicts: a third of the variance is left, at most, where the
    group's mean leaves all of it."""
    rng = RNG(0)
    settings = probe.Settings(layer=-1, dimensions=8, ridge=0.1, memory=0.95)
    for method in (values.Method(settings), poise.Method(settings)):
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
    assert method.rate_factor(log_weights_B) == pytest.approx(factor, abs=5e-5)
    assert method.rate_factor(log_weights_B - 5000.0) == pytest.approx(factor, abs=5e-5)


@given(st.lists(st.floats(0.1, 5.0), min_size=3, max_size=8))
def test_the_baseline_of_least_variance_is_one(weights: list[float]) -> None:
    weights_B, rewards_B = np.array(weights), np.arange(len(weights)) % 2.0
    group_B = np.zeros(len(weights), dtype=np.int64)
    advantages_B = min_variance.advantage(rewards_B, group_B, weights_B)
    baseline = float((rewards_B - advantages_B)[0])

    def spread(b: float) -> float:
        return float((weights_B**2 * (rewards_B - b) ** 2).sum())

    assert spread(baseline) <= min(spread(baseline + d) for d in (-0.01, 0.01)) + 1e-12


# --- F-TIS: METHODS 7.6


def test_f_tis_leaves_out_what_is_far_away_and_no_better() -> None:
    choose = f_tis.Method(f_tis.Settings(limit=1.0))
    rollouts = rollouts_of([1, 0, 1, 0], [0, 0, 1, 1], [3] * 4)
    sampler_N = np.zeros(12)

    def kept(logprobs_N: np.ndarray) -> list[bool]:
        observed = Observed(logprobs_N, np.zeros(12))
        return choose(dataclasses.replace(rollouts, observed=observed), RNG(0)).tolist()

    assert kept(sampler_N) == [True] * 4  # the same policy
    far_N = sampler_N.copy()
    far_N[:6] += 1.0  # both of the first group: 3 tokens of e - (e - 1) = 1 nat each
    assert kept(far_N) == [True, False, True, True]


# --- BroRL: METHODS 5.7


def test_a_softmax_policy_gains_the_mass_that_brorl_derives() -> None:
    """The mass of correct tokens after one small step of our loss, against the paper's formula."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(12, generator=generator, dtype=torch.float64).requires_grad_()
    is_correct = torch.arange(12) < 4
    sampled = torch.tensor([0, 2, 5, 6, 9])
    correct, wrong, rate, num = 1.0, -0.5, 1e-6, 5
    rewards = torch.where(is_correct, correct, wrong).double()
    logprobs = logits.log_softmax(-1)
    p = logprobs.detach().exp()
    tokens = Tokens(
        logprobs[sampled],
        logprobs.detach()[sampled],
        p[sampled],  # a token counts with its chance: the sum over the sample, not an estimate
        rewards[sampled],
        torch.arange(num),
        num,
    )
    settings = dataclasses.replace(clip.EXAMPLE, normalize="token")
    loss, _ = clip.Method(settings)(tokens, StepTotals(num, num, 1))
    loss.backward()
    assert logits.grad is not None
    moved = (logits.detach() - rate * logits.grad).softmax(-1)
    gained = float(moved[is_correct].sum() - p[is_correct].sum())

    is_sampled = torch.zeros(12, dtype=torch.bool)
    is_sampled[sampled] = True
    q_pos, q_neg = float(p[is_correct].sum()), float(p[~is_correct].sum())
    mass = correct * p[is_correct & is_sampled].sum() + wrong * p[~is_correct & is_sampled].sum()

    def squares(chosen: torch.Tensor) -> float:
        return float((p[chosen] ** 2).sum())

    expected = (rate / num) * (
        (correct - mass) * q_neg * squares(is_correct & is_sampled)
        + (mass - wrong) * q_pos * squares(~is_correct & is_sampled)
        + mass
        * (q_pos * squares(~is_correct & ~is_sampled) - q_neg * squares(is_correct & ~is_sampled))
    )
    assert gained == pytest.approx(float(expected), rel=1e-4)


# --- per-part normalisation, lengths


def test_a_part_that_varies_little_weighs_as_much_as_the_others() -> None:
    rollouts = rollouts_of([0.95, 0.05, 0.0, 0.95], [0] * 4)
    parts = ((1.0, 0.5), (0.0, 0.5), (0.0, 0.0), (1.0, 0.5))
    split = dataclasses.replace(rollouts, scores=[{"a": a, "b": b} for a, b in parts])
    found = decoupled.Method(decoupled.Settings({"a": 0.5, "b": 0.5}))(split)
    root = 3**0.5
    np.testing.assert_allclose(
        found, 0.5 * np.array([1, -1, -1, 1]) + 0.5 * np.array([1, 1, -3, 1]) / root
    )


def test_short_correct_answers_weigh_more_also_in_a_group_that_is_all_correct() -> None:
    method = efficient.Method(efficient.Settings(strength=0.2))
    mixed = method(rollouts_of([1, 1, 0], [0] * 3, [2, 6, 4]))
    assert mixed[0] > mixed[1] > 0 > mixed[2]
    easy = method(rollouts_of([1, 1, 1], [0] * 3, [2, 4, 6]))
    assert easy[0] > easy[1] > easy[2]
    assert method(rollouts_of([1, 1], [0] * 2, [5, 5])).tolist() == [0.0, 0.0]
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


# --- what a review of the above found


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


def test_a_state_that_is_not_finite_does_not_spoil_the_probe() -> None:
    state = probe.new_state(2)
    rows = np.array([[1.0, 1.0], [np.inf, 1.0], [2.0, 1.0]])
    probe.learn(state, rows, np.array([0.0, 1.0, 1.0]), 0.9)
    assert np.isfinite(probe.predict(state, rows[::2], 1.0)).all()


def test_groups_that_could_not_be_graded_do_not_move_a_prompt_to_one_half() -> None:
    method = dots.Method(dots.EXAMPLE, passes_of(2, 8, 1))
    method.observe(rollouts_of([0.0] * 8, [0] * 8, prompt_rows=[0]))
    before = method.pass_rates().tolist()
    method.observe(rollouts_of([0.0] * 8, [0] * 8, prompt_rows=[0], errors=8))
    assert method.pass_rates().tolist() == before


def test_a_prompt_that_a_step_visits_twice_is_kept_once() -> None:
    method = recent.Method(recent.EXAMPLE)
    method.add(rollouts_of([1, 0, 0, 1], [0, 0, 1, 1], [1, 1, 2, 2], prompt_rows=[7, 7]))
    assert method.state.prompt_rows_G.tolist() == [7]
    assert method.state.lengths_B.tolist() == [2, 2]


# --- One-sided updates: METHODS 13.17


def of_outcomes(num_correct: int, size: int) -> Rollouts:
    return rollouts_of([1.0] * num_correct + [0.0] * (size - num_correct), [0] * size)


@pytest.mark.parametrize(
    ("size", "rate", "cost", "shrink"),
    [
        (4, 0.25, np.inf, 0.86),
        (4, 0.5, np.inf, 0.625),
        (4, 0.875, np.inf, 0.71),
        (8, 0.125, np.inf, 0.994),
        (8, 0.25, np.inf, 0.942),
        (8, 0.5, np.inf, 0.7266),
        (8, 0.75, np.inf, 0.827),
        (16, 0.5, np.inf, 0.804),
        (64, 0.5, np.inf, 0.90),
        # groups of four correct are two-sided: the formula of the majority alone holds no more
        (8, 0.5, 3.0, 0.7656),
        (4, 0.25, 3.0, 0.8125),
    ],
)
def test_the_own_majority_shrinks_the_expected_gradient_and_does_not_turn_it(
    size: int, rate: float, cost: float, shrink: float
) -> None:
    """A prompt with one logit: its score is r - p, the gradient of its pass rate p (1 - p)."""
    method = one_sided.Method(one_sided.Settings(update_cost=cost))
    expected = 0.0
    for num in range(size + 1):
        rewards = np.array([1.0] * num + [0.0] * (size - num))
        gain = float((method(of_outcomes(num, size)) * (rewards - rate)).mean())
        expected += float(stats.binom.pmf(num, size, rate)) * gain
    assert expected / (rate * (1 - rate)) == pytest.approx(shrink, abs=0.006)


@pytest.mark.parametrize(("cost", "evenest"), [(0.2, 0.143), (0.5, 0.25), (1, 0.333), (3, 0.4286)])
def test_a_group_evener_than_pays_is_two_sided(cost: float, evenest: float) -> None:
    size = 1000
    method = one_sided.Method(one_sided.Settings(update_cost=cost))
    for num in (1, int(evenest * size) - 1, int(evenest * size) + 1, size // 2):
        updated = np.flatnonzero(method(of_outcomes(num, size)))
        assert len(updated) == (num if num / size < evenest else size)
        mirrored = np.flatnonzero(method(of_outcomes(size - num, size)))
        assert len(mirrored) == (num if num / size < evenest else size)


def test_one_sided_advantages_by_hand() -> None:
    method = one_sided.Method(one_sided.Settings(update_cost=3.0))
    assert method(of_outcomes(1, 4)).tolist() == [1, 0, 0, 0]
    assert method(of_outcomes(3, 4)).tolist() == [0, 0, 0, -1]
    assert method(of_outcomes(2, 4)) == pytest.approx(rloo.Method()(of_outcomes(2, 4)))
    always = one_sided.Method(one_sided.Settings(update_cost=float("inf")))
    assert always(of_outcomes(2, 4)).tolist() == [1, 1, 0, 0]
    never = one_sided.Method(one_sided.Settings(update_cost=0.0))
    assert never(of_outcomes(1, 4)) == pytest.approx(rloo.Method()(of_outcomes(1, 4)))


def test_what_an_environment_wrote_is_no_distance_between_policies() -> None:
    """Its tokens have a sampler's log-probability of 0 and the policy's own of anything."""
    rollouts = observed_of(rollouts_of([1.0, 0.0], [0, 0], [4, 4]))
    assert rollouts.observed is not None
    own_N = np.array([True, False, False, True] * 2)
    logprobs = [[-0.5, 0.0, 0.0, -0.5]] * 2
    seen_N = np.where(own_N, -0.5, -9.0)
    marked = dataclasses.replace(
        rollouts,
        samples=dataclasses.replace(rollouts.samples, logprobs=logprobs),
        observed=dataclasses.replace(rollouts.observed, logprobs_N=seen_N),
        is_action_N=own_N,
    )
    assert f_tis.divergence(marked).tolist() == [0.0, 0.0]
    unmarked = dataclasses.replace(marked, is_action_N=None)
    assert (f_tis.divergence(unmarked) > 1.0).all()
    norms = dataclasses.replace(marked.observed, gradient_norms_B=np.array([1.0, 1.0]))
    equal = dataclasses.replace(marked, observed=norms)
    assert min_variance.Method()(equal).tolist() == [0.5, -0.5]
