"""Pass rates during a run, and their use by `winnow` for prompts and baselines."""

from dataclasses import replace

import numpy as np
import polars as pl
import pytest

from tasks.train.data.rollouts import Rollouts
from tasks.train.methods.advantage import posterior, rloo
from tasks.train.methods.control import information
from tasks.train.methods.pass_rates import LIKENESS_WEIGHT, PassRates, PriorSettings, strata_of
from tasks.train.settings import BatchSettings
from tests.train.steps import answer_to, passes_of, prompts_of, requested, rollouts_of

PRIOR = PriorSettings(strength=4.0, prompt_window=8.0, stratum_window=16.0)


def count(rates: PassRates, rows: list[int], correct: list[float], trials: list[int]) -> PassRates:
    """Count so many successes of so many trials of each prompt."""
    group_B = np.repeat(np.arange(len(rows)), trials)
    place_B = np.concatenate([np.arange(size) for size in trials])
    rates.add(np.array(rows), group_B, (place_B < np.array(correct)[group_B] - 0.5).astype(float))
    return rates


def means(rates: PassRates, rows: list[int]) -> list[float]:
    first, second = rates.beta(np.array(rows))
    return list(first / (first + second))


def test_a_stratum_is_a_source_with_a_level_and_a_length() -> None:
    rows = [(s, level, "x" * n) for s in "ab" for level in "12" for n in range(1, 81)]
    strata = strata_of(pl.DataFrame(rows, schema=["source", "level", "prompt"], orient="row"))
    strata = strata.reshape(2, 2, 80)
    assert np.unique(strata).tolist() == list(range(2 * 2 * 8))
    for one in strata.reshape(4, 80):  # each has an eighth of a source's prompts
        assert np.bincount(one)[one[0] :].tolist() == [10] * 8


def test_the_beta_of_a_prompt_by_hand() -> None:
    rates = PassRates(PRIOR, prompts_of(2).with_columns(prompt=pl.lit("?")))
    count(rates, [0, 1], [1, 4], [4, 4])
    overall = (5 + 0.5) / (8 + 1)
    prior = (1 + 4 * overall) / (4 + 4)
    # before, all was even: no pair of the first and every pair of the second is correct twice
    between, total = (0 - 0.25) + (1 - 0.25), 0.25 + 0.25
    likeness = (between + LIKENESS_WEIGHT / 5) / (total + LIKENESS_WEIGHT)
    strength = 1 / likeness - 1
    first, second = rates.beta(np.array([0]))
    assert first[0] == pytest.approx(1 + strength * prior)
    assert second[0] == pytest.approx(3 + strength * (1 - prior))


def test_old_outcomes_leave_the_window() -> None:
    rates = PassRates(PRIOR, prompts_of(1))
    for _ in range(20):
        count(rates, [0], [0], [8])
    for _ in range(4):
        count(rates, [0], [8], [8])
    assert means(rates, [0])[0] > 0.8
    assert rates.belief.trials[0] == PRIOR.prompt_window
    assert rates.belief.stratum_trials[0] == PRIOR.stratum_window


def estimate_of(cost: float, trials: int = 0, correct: float = 0.0) -> posterior.Method:
    """Return the method after so many outcomes of the first prompt."""
    method = posterior.Method(posterior.Settings(cost, PRIOR), prompts_of(2))
    if trials:
        count(method.rates, [0], [correct], [trials])
    return method


@pytest.mark.parametrize("seen", [0.0, 1.0, 4.0, 8.0])
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("rate", [0.125, 0.5, 0.75])
def test_the_gradient_is_unbiased(rate: float, size: int, seen: float) -> None:
    """With two outcomes the score of the logit is r - p, and the gradient of p is p (1 - p): the
    exact mean over all groups."""
    method = estimate_of(3.0, 8, seen)
    mean = 0.0
    for outcome in np.ndindex(*[2] * size):
        rewards = np.array(outcome, dtype=float)
        chance = np.prod(np.where(rewards == 1, rate, 1 - rate))
        advantages = method(rollouts_of(rewards, [0] * size))
        mean += chance * (advantages * (rewards - rate)).mean()
    assert mean == pytest.approx(rate * (1 - rate))


def rewarded(rewards: list[float], is_correct: list[bool]) -> Rollouts:
    """Return one group with these rewards and outcomes."""
    outcomes = ["correct" if right else "wrong" for right in is_correct]
    return rollouts_of(rewards, [0] * len(rewards)).with_columns(outcome=outcomes)


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (0.1, 0.9), (-1.0, 1.0)])
def test_the_expected_outcome_has_advantage_0(low: float, high: float) -> None:
    hard, easy = estimate_of(3.0), estimate_of(3.0)
    for method, right in ((hard, [False] * 7), (easy, [True] * 7)):
        method.observe(rewarded([high if r else low for r in right], right))
        # the other outcome, for another prompt
        other = rewarded([low if right[0] else high], [not right[0]])
        method.observe(replace(other, prompt_rows_Q=np.array([1])))
    mixed = rewarded([high, low, low], [True, False, False])
    assert hard(mixed) == pytest.approx([high - low, 0.0, 0.0])
    assert easy(mixed) == pytest.approx([0.0, low - high, low - high])
    assert [(hard(mixed) == 0).sum(), (easy(mixed) == 0).sum()] == [2, 1]  # exactly
    # a group of one, and an unexpectedly solved one
    assert hard(rewarded([high], [True])) == pytest.approx([high - low])
    assert hard(rewarded([high, high], [True, True])) == pytest.approx([high - low] * 2)


def test_rewards_that_differ_within_an_outcome_all_count() -> None:
    method = estimate_of(3.0)
    method.observe(rewarded([0.0, 0.1] * 4, [False] * 8))  # wrong, but some in the correct format
    found = method(rewarded([0.0, 0.1, 1.0], [False, False, True]))
    first, second = method.rates.beta(np.array([0]))
    baseline = 0.05 + 0.95 * (first[0] + 1) / (first[0] + second[0] + 2)
    assert found[:2] == pytest.approx([0.0 - baseline, 0.1 - baseline])
    assert found[2] > 0.5


def test_the_baseline_of_an_even_prompt() -> None:
    method = estimate_of(3.0, 8, 4)
    first, second = method.rates.beta(np.array([0]))
    found = method(rollouts_of([1.0, 0.0], [0, 0]))
    total = first[0] + second[0] + 1
    assert found == pytest.approx([1 - first[0] / total, -(first[0] + 1) / total])
    # with fewer outcomes it is closer to the mean of the others
    method = posterior.Method(posterior.Settings(0.0, PRIOR), prompts_of(1))
    rollouts = rollouts_of([1.0, 0.0, 0.0, 1.0], [0] * 4)
    others, gaps = rloo.Method()(rollouts), []
    for between in (0.0, 40.0):
        method.state.between, method.state.total = between, 50.0
        gaps.append(float(np.abs(method(rollouts) - others).max()))
    assert gaps[1] < gaps[0] / 4


def choose(candidates: int, rates: list[float], steps: int) -> np.ndarray:
    """Return how often each prompt is sampled, in groups of 4, with well-known rates."""
    plan = passes_of(len(rates), 4, 1000)
    prior = PriorSettings(1.0, 400.0, 1.0)
    method = information.Method(
        information.Settings(3.0, candidates, prior), plan, prompts_of(len(rates))
    )
    count(method.rates, list(range(len(rates))), [400 * p for p in rates], [400] * len(rates))
    counts = np.zeros(len(rates), dtype=int)
    for step in range(steps):
        request = requested(method, step)
        counts[request.prompt_rows] += 1
    return counts


def test_prompts_with_the_most_information_per_cost_are_sampled() -> None:
    rates = [0.0, 1.0, 0.01, 0.5, 0.3, 0.7, 0.99, 0.0]
    # even prompts cost more updates
    assert np.flatnonzero(choose(4, rates, 50)).tolist() == [4, 5]
    even = choose(1, rates, 400)
    assert even.sum() == 800
    assert even.min() > 70


def test_the_information_per_cost_of_a_rollout() -> None:
    found = information.worth(np.array([0.0, 0.5, 0.25, 0.9]), 3.0)
    # at one half all are updated, else only the rarer outcome
    assert found == pytest.approx([0.0, 0.25 / 4, 0.1875 * 0.75 / 1.75, 0.09 * 0.9 / 1.3])


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("spread", [0.5, 1.0])
def test_the_loss_of_the_baseline_on_chosen_prompts(spread: float, size: int) -> None:
    """It is about a tenth of the information. True rates from Beta(a, a), settings of `winnow`, 60
    steps of 128 rollouts."""
    rng, lost_information, total = np.random.default_rng(0), 0.0, 0.0
    true_P, prior = rng.beta(spread, spread, 600), PriorSettings(8.0, 8.0, 64.0)
    prompts = prompts_of(600).with_columns(prompt=pl.lit("?"), level=pl.lit(""))
    plan = passes_of(600, size, 20, BatchSettings("rollouts", 128, "generated"))
    control = information.Method(information.Settings(3.0, 2, prior), plan, prompts)
    method = posterior.Method(posterior.Settings(0.0, prior), prompts)
    for step in range(60):
        request = requested(control, rng)
        rates_B = np.repeat(true_P[request.prompt_rows], request.counts)
        outcomes_B = (rng.random(len(rates_B)) < rates_B).astype(float)
        rollouts = answer_to(request, outcomes_B.tolist())
        if step >= 20:
            baseline_B = outcomes_B - method(rollouts)
            lost_information += float(((baseline_B - rates_B) ** 2).sum())
            total += float((rates_B * (1 - rates_B) + (baseline_B - rates_B) ** 2).sum())
        control.observe(rollouts)
        method.observe(rollouts)
    assert 0.08 < lost_information / total < 0.13
