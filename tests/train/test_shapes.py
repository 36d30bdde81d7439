"""Changes of rewards and advantages: published and hand-computed values."""

import dataclasses
import itertools
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from tasks.train.data.columns import Floats, nested
from tasks.train.data.rollouts import Observed, Rollouts, StepTotals
from tasks.train.methods.advantage import grpo, grpo_sample
from tasks.train.methods.loss import clip
from tasks.train.methods.rate_bins import bin_of
from tasks.train.methods.shape import (
    cov_mask,
    cppo,
    entropy_mask,
    failures,
    gdro,
    kondo,
    length,
    nat,
    nll,
    novelty,
    overlong,
    pruned_po,
    repetition,
    signs,
)
from tests.train.steps import observed_of, prompts_of, rollouts_of, tokens_of
from tests.train.worlds import make_trainer, make_world

RNG = np.random.default_rng(0)


def shape_of(module: ModuleType, **settings: Any) -> Any:
    return module.Method(module.Settings(**settings)) if settings else module.Method()


def completions_of(rewards: list[float], lengths: list[int]) -> Rollouts:
    """Return one group of completions of these lengths."""
    return rollouts_of(rewards, [0] * len(rewards), lengths)


def test_a_penalty_grows_towards_the_limit() -> None:
    rollouts = completions_of([0.0, 1.0, 0.0, 1.0], [40, 48, 56, 64])
    rewards = shape_of(overlong, share=0.25).rewards(rollouts, 64)
    assert rewards.tolist() == [0.0, 1.0, -0.5, 0.0]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_truncated_completions_leave_the_loss_its_divisor_and_the_quantile(
    order: tuple[int, int], guesser: Path, tmp_path: Path
) -> None:
    """The second completion is cut. The highest entropies are its own, so the quantile .5 is of the
    other three tokens. The rewards' mean counts it: advantages sqrt(2), -sqrt(2) / 2."""
    both = [{"method": "truncated"}, {"method": "entropy_mask", "keep": 0.5}]
    layout = make_world(tmp_path, guesser, [3] * 2)
    trainer = make_trainer(layout, shape=[both[place] for place in order])
    rollouts = completions_of([1.0, 0.0, 0.0], [1, 2, 2])
    rollouts = rollouts.with_columns(reason=["stop", "length", "stop"])
    seen = Observed(np.zeros(5), np.array([0.3, 0.8, 0.9, 0.2, 0.1]))
    found = trainer.estimate(dataclasses.replace(rollouts, observed=seen), RNG)
    assert found.kept_B.tolist() == [True, False, True]
    assert found.advantages_N == pytest.approx([2**0.5, 0.0, 0.0, -(0.5**0.5), 0.0])
    assert found.trained_N().all()  # as recorded
    totals = trainer.learner.totals(found, drops_cut=trainer.slots.drops_cut)
    assert (totals.num_tokens, totals.num_rollouts) == (3, 3)


def test_short_correct_completions_gain_and_long_ones_lose() -> None:
    rollouts = completions_of([1.0, 1.0, 1.0, 0.0], [10, 20, 40, 30])
    gains = shape_of(length, weight=1.0).rewards(rollouts, 64) - rollouts.rewards_B
    assert gains == pytest.approx([0.5, 1 / 6, -0.5, -1 / 6])
    equal = completions_of([1.0, 0.0], [5, 5])
    assert shape_of(length, weight=1.0).rewards(equal, 64).tolist() == [1.0, 0.0]


def test_repeated_ngrams_have_a_penalty() -> None:
    assert repetition.repeated([[5, 5, 5, 5, 5]], 2) == 0.75
    assert repetition.repeated([[1, 2, 3]], 2) == 0.0
    assert repetition.repeated([[1]], 2) == 0.0
    own = [True, True, False, False, True, True]
    assert repetition.turns([1, 2, 1, 2, 3, 4], own) == [[1, 2], [3, 4]]
    rollouts = completions_of([1.0, 0.0], [5, 1])  # all tokens are equal
    assert shape_of(repetition, n=2, weight=1.0).rewards(rollouts, 64).tolist() == [0.25, 0.0]


def test_factors_for_both_signs() -> None:
    rollouts, both = completions_of([1.0, 0.0], [1, 2]), np.array([1.0, -1.0, -1.0])
    found = shape_of(signs, positive=0.1, negative=1.0).advantages(rollouts, both, RNG)
    assert found.tolist() == [0.1, -1.0, -1.0]


def test_a_failed_group_has_advantages_by_a_virtual_success() -> None:
    rollouts = rollouts_of([0.0] * 8 + [1.0, 0.0], [0] * 8 + [1] * 2)
    before = np.array([0.0] * 8 + [1.0, -1.0])
    found = shape_of(failures).advantages(rollouts, before, RNG)
    mean, deviation = 1 / 9, np.sqrt(1 / 9 * 8 / 9)  # of eight failures and one success
    assert found == pytest.approx([-mean / deviation] * 8 + [1.0, -1.0])
    assert found[0] == pytest.approx(-0.3536, abs=5e-5)


def test_failed_groups_are_found_by_outcome() -> None:
    correct = completions_of([1.0, 1.0], [1, 1]).with_columns(reward=[0.0, 0.0])
    assert shape_of(failures).advantages(correct, np.zeros(2), RNG).tolist() == [0.0, 0.0]
    wrong = completions_of([0.0, 0.0], [1, 1]).with_columns(reward=[0.0, -0.5])
    found = shape_of(failures).advantages(wrong, np.array([1.0, -1.0]), RNG)
    assert found == pytest.approx([-(0.5**0.5)] * 2)


def test_only_tokens_of_high_entropy_have_an_advantage() -> None:
    rollouts = observed_of(completions_of([1.0, 0.0], [10, 10]))
    assert rollouts.observed is not None
    found = shape_of(entropy_mask, keep=0.2).advantages(rollouts, np.ones(20), RNG)
    entropies = rollouts.observed.entropies_N
    assert found.sum() == 4
    assert entropies[found > 0].min() > entropies[found == 0].max()


def test_of_equal_entropies_the_first_are_trained_on() -> None:
    """A fifth of ten is 10 - ceil(.8 x 9) = 2; the quantile of .8 is one of nine equal values."""
    rollouts = observed_of(completions_of([1.0], [10]))
    assert rollouts.observed is not None
    rollouts.observed.entropies_N[:] = [0, 0, 0, 0, 0, 0, 0, 2, 0, 0]
    found = shape_of(entropy_mask, keep=0.2).advantages(rollouts, np.ones(10), RNG)
    assert np.flatnonzero(found).tolist() == [0, 7]
    assert shape_of(entropy_mask, keep=1.0).advantages(rollouts, np.ones(10), RNG).all()


def with_logprobs(rollouts: Rollouts, logprobs: list[float]) -> Rollouts:
    """Return the rollouts with these log-probabilities under the policy and the sampler."""
    logprobs_N = np.array(logprobs)
    rollouts = rollouts.with_columns(logprobs=nested(logprobs_N, rollouts.completion_tokens_B()))
    return dataclasses.replace(rollouts, observed=Observed(logprobs_N, np.zeros(len(logprobs))))


def test_rare_correct_rollouts_of_a_group_gain() -> None:
    """The mean of two tokens excludes the environment's token of probability e^-9."""
    logprobs = [-0.4, -0.6, -0.7, -0.3, -9.0, -0.5, -0.5, -2.0]
    rollouts = rollouts_of([1.0, 1.0, 0.0, 1.0, 1.0], [0, 0, 0, 0, 1], [2, 1, 2, 2, 1])
    own = [[True] * 2, [True], [True, False], [True] * 2, [True]]
    rollouts = with_logprobs(rollouts, logprobs).with_columns(is_action=own)
    given = np.array([1.0, 1.0, 1.0, -3.0, -3.0, 1.0, 1.0, 0.5])

    def found(**settings: float) -> list[float]:
        shaped: Floats = shape_of(novelty, **settings).advantages(rollouts, given, RNG)
        return shaped.tolist()

    assert found(weight=2.5) == pytest.approx([1, 1, 1.4532, -3, -3, 1, 1, 0.5], abs=5e-5)
    assert found(weight=25.0)[2] == 1.5
    assert found(limit=0.0) == given.tolist() == found(weight=0.0)
    dead = shape_of(novelty, weight=2.5).advantages(rollouts, -given, RNG)
    assert dead.tolist() == (-given).tolist()  # there is no gain below 0


def test_tokens_of_a_large_covariance_are_masked_at_random() -> None:
    rollouts = completions_of([1.0, 0.0], [3, 2])
    rollouts = rollouts.with_columns(is_action=[[True, True, False], [True, True]])
    rollouts = with_logprobs(rollouts, [-1.0, -5.0, 40.0, -1.0, -5.0])
    given = np.array([2.0, 2.0, 90.0, -2.0, -2.0])  # covariances 4, -4, (none), -4, 4
    one = shape_of(cov_mask, drop=2e-4)
    drawn = [one.advantages(rollouts, given, np.random.default_rng(seed)) for seed in range(20)]
    assert {tuple(np.flatnonzero(found != given)) for found in drawn} == {(0,), (4,)}
    assert all(found[found != given].tolist() == [0.0] for found in drawn)
    both = shape_of(cov_mask, drop=0.5).advantages(rollouts, given, RNG)
    assert both.tolist() == [0.0, 2.0, 90.0, -2.0, 0.0]
    outside = shape_of(cov_mask, low=4.5, high=9.0).advantages(rollouts, given, RNG)
    assert outside.tolist() == given.tolist()


class Coins:
    """Given numbers in [0, 1) in place of random ones."""

    def __init__(self, numbers: list[float]) -> None:
        self.numbers = numbers

    def random(self, size: int) -> Floats:
        return np.array(self.numbers[:size])


@pytest.mark.parametrize("drop", [0.5, 0.75])
def test_random_pruning_does_not_change_the_mean_advantage(drop: float) -> None:
    """The exact mean is over all outcomes of the coins, in ragged groups of rollouts of two tokens;
    the variance of an advantage that can be dropped grows by 1 / (1 - drop)."""
    rewards, groups = [1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 1.0, 0.5], [0, 0, 0, 0, 1, 1, 3, 3]
    rollouts = rollouts_of(rewards, groups, [2] * 8)
    given = grpo.advantage(rollouts.rewards_B, rollouts.group_B)[rollouts.owner_N()]
    method = shape_of(pruned_po, drop=drop)
    mean, squares, num_rows = np.zeros(16), np.zeros(16), set()
    for dropped in itertools.product([True, False], repeat=8):
        coins = Coins([0.99 if is_dropped else 0.0 for is_dropped in dropped])
        found = method.advantages(rollouts, given, coins)
        chance = np.prod([drop if is_dropped else 1.0 - drop for is_dropped in dropped])
        mean, squares = mean + chance * found, squares + chance * found**2
        num_rows.add(int((found != 0).sum() / 2))
    np.testing.assert_allclose(mean, given)
    factor = np.repeat([1.0, *[1.0 / (1.0 - drop)] * 3, 1.0, 1.0, 1.0, 1.0], 2)
    np.testing.assert_allclose(squares, factor * given**2)
    assert num_rows == {5, 6, 7, 8}


@pytest.mark.parametrize("module", [pruned_po, cppo])
def test_nothing_is_pruned_with_drop_0(module: ModuleType) -> None:
    rollouts = rollouts_of([1.0, 0.0, 0.0, 0.0, 0.1, 0.1, 0.1], [0, 0, 0, 0, 2, 2, 2])
    given = np.array([0.3, -0.1, -0.1, -0.1, 0.1, 0.1, 0.1])
    found = shape_of(module, drop=0.0).advantages(rollouts, given, RNG)
    assert found.tolist() == given.tolist()


def test_equal_advantages_are_not_pruned_despite_rounding() -> None:
    rollouts, given = rollouts_of([0.0] * 3, [0] * 3), np.full(3, 0.1)
    assert sum(given) / 3 > 0.1
    found = shape_of(pruned_po, drop=0.9).advantages(rollouts, given, Coins([0.99] * 3))
    assert found.tolist() == given.tolist()


def test_cppo_keeps_the_largest_advantages_of_each_group() -> None:
    rewards = [0.0] * 5 + [1.0] + [0.0] * 10
    rollouts = rollouts_of(rewards, [0] * 16)
    given = grpo_sample.advantage(rollouts.rewards_B, rollouts.group_B, epsilon=1e-4)
    found = shape_of(cppo, drop=0.875).advantages(rollouts, given, RNG)
    assert found[5] == pytest.approx(3.7485, abs=5e-5)
    assert sorted(found)[:2] == pytest.approx([-0.2499, 0.0], abs=5e-5)
    assert (found != 0).sum() == 2
    ragged = rollouts_of([0.0] * 8, [0, 0, 0, 0, 1, 3, 3, 3], [1, 2, 1, 1, 1, 1, 1, 1])
    given = np.array([0.1, 0.5, 0.5, -2.0, 0.2, 0.3, -1.0, 2.0, -2.5])
    found = shape_of(cppo, drop=0.5).advantages(ragged, given, RNG)
    assert found.tolist() == [0.0, 0.5, 0.5, -2.0, 0.0, 0.3, 0.0, 0.0, -2.5]


@pytest.mark.parametrize(
    ("keep", "expected"),
    [(1.0, [1, 1, 1, -1, -1]), (0.5, [1, 1, 1, 0, 0]), (0.25, [0, 1, 1, 0, 0])],
)
def test_kondo_keeps_tokens_with_the_largest_priorities(keep: float, expected: list[float]) -> None:
    """The priorities are .1, 2, (9 for an environment's token), -.5 and -3."""
    rollouts = completions_of([1.0, 0.0], [3, 2])
    rollouts = rollouts.with_columns(is_action=[[True, True, False], [True, True]])
    rollouts = with_logprobs(rollouts, [-0.1, -2.0, -9.0, -0.5, -3.0])
    given = np.array([1.0, 1.0, 1.0, -1.0, -1.0])
    found = shape_of(kondo, keep=keep).advantages(rollouts, given, RNG)
    assert found.tolist() == expected


def prefix(whole: float, lengths: list[int], numbers: list[float]) -> Floats:
    """Return the weights of the tokens of completions, whose cuts these numbers determine."""
    rollouts = completions_of([1.0] * len(lengths), lengths)
    found: Floats = shape_of(nat, whole=whole).advantages(
        rollouts, np.ones(sum(lengths)), Coins(numbers)
    )
    return found


@pytest.mark.parametrize("whole", [0.0, 0.5, 0.75])
def test_the_mean_over_all_cuts_is_the_whole_completion(whole: float) -> None:
    """The numbers are the middles of equal cells; each cut has a whole number of cells."""
    numbers = [(cell + 0.5) / 60 for cell in range(60)]
    drawn = [prefix(whole, [5, 3, 1], [number] * 3) for number in numbers]
    np.testing.assert_allclose(np.mean(drawn, axis=0), np.ones(9))
    kept = np.mean([found > 0 for found in drawn], axis=0)
    chances = [whole + (1 - whole) * share for share in (1, 0.8, 0.6, 0.4, 0.2)]
    np.testing.assert_allclose(kept[:5], chances)
    ends = {tuple(np.flatnonzero(found[:5] > 0)) for found in drawn}
    assert ends == {tuple(range(end)) for end in range(1, 6)}


def test_an_atom_bounds_the_weights_of_a_long_completion() -> None:
    """The published figures for 1,000 tokens without an atom: half are kept, the mean weight is
    7.49 and the largest 1,000."""
    weights = prefix(0.0, [1000], [0.0])
    assert weights.mean() == pytest.approx(7.49, abs=0.01)
    assert weights.max() == pytest.approx(1000)
    assert (1 / weights).mean() == pytest.approx(0.5, abs=1e-3)
    assert prefix(0.25, [1000], [0.0]).max() == pytest.approx(4, rel=0.01)
    assert prefix(1.0, [3, 2], [0.0, 0.999]).tolist() == [1.0] * 5


# --- nll


def test_correct_rollouts_are_imitated() -> None:
    """With an average over all tokens, it raises the mean log-probability of the correct ones."""
    rollouts = rollouts_of([1.0, 0.0, 1.0, 1.0], [0, 0, 1, 1], [2, 3, 1, 2])
    own = [[True, False], [True] * 3, [True], [True] * 2]
    rollouts = rollouts.with_columns(is_action=own)
    given = np.array([1.0, 1.0, -1.0, -1.0, -1.0, 0.0, 0.0, 0.0])
    found = shape_of(nll, weight=0.5).advantages(rollouts, given, RNG)
    share = 7 / 4  # the policy's tokens, over those of correct rollouts
    more = 0.5 * share * np.array([1, 0, 0, 0, 0, 1, 1, 1])
    np.testing.assert_allclose(found, given + more)
    logs = torch.linspace(-2.0, -0.5, 8, dtype=torch.float64).requires_grad_()
    trained_N = torch.from_numpy(rollouts.trained_N())
    row_N, both = torch.from_numpy(rollouts.owner_N())[trained_N], []
    for advantages in (found, given):
        gains = torch.from_numpy(advantages)[trained_N]
        tokens = tokens_of(logs[trained_N], gains, logs.detach()[trained_N], row_N)
        loss, _ = clip.Method(clip.Settings())(tokens, StepTotals(7, 4, 9))
        both.append(torch.autograd.grad(loss, logs)[0])
    term = -0.5 * logs[torch.from_numpy(more > 0)].mean()
    (expected,) = torch.autograd.grad(term, logs)
    torch.testing.assert_close(both[0] - both[1], expected)
    none = completions_of([0.0, 0.0], [1, 1])
    assert shape_of(nll, weight=1.0).advantages(none, np.ones(2), RNG).tolist() == [1.0, 1.0]


# --- gdro


def gdro_of(**settings: Any) -> gdro.Method:
    return gdro.Method(gdro.Settings(**settings), prompts_of(9))


def test_weights_of_bins_by_their_scores() -> None:
    """Published values; the cap applies after the mean."""
    scores = np.array([0.2, 0.5, 0.9])
    found = gdro.bin_weights(scores, 1.0, 2.0)
    assert found == pytest.approx([0.6875, 0.9280, 1.3845], abs=5e-5)
    assert gdro.bin_weights(scores, 1.0, 1.2)[2] == 1.2
    assert gdro.bin_weights(scores, 0.0, 2.0).tolist() == [1.0, 1.0, 1.0]


def test_gdro_weights_advantages_by_the_bins_of_earlier_steps() -> None:
    """Two prompts have pass rates 1/4 and 3/4; a third is new, and one could not be graded."""
    method = gdro_of(width=0.5, rate=0.1, memory=0.5)
    step = rollouts_of([1, 0, 0, 0, 1, 1, 1, 0], [0] * 4 + [1] * 4, prompt_rows=[5, 2])
    ones = np.ones(8)
    assert method.advantages(step, ones, RNG).tolist() == ones.tolist()
    method.observe(step)
    assert (method.state.bins[5], method.state.bins[2], method.state.bins[0]) == (0, 1, -1)
    assert method.weights().tolist() == [1.0, 1.0]  # no bin has a score yet
    method.observe(step)
    easy, hard = np.exp(0.25), np.exp(0.75)  # 1 - mean reward, with bias correction
    mean = (easy + hard) / 2
    assert method.weights() == pytest.approx([hard / mean, easy / mean])
    method.observe(rollouts_of([1, 1, 0, 0], [0, 0, 1, 1], prompt_rows=[5, 2], errors=2))
    score = (0.75 * 0.9 * 0.1 + 0.1 * 0.0) / (1 - 0.9**2)  # of the bin of prompt 5
    assert method.weights()[0] == pytest.approx(np.exp(score) / ((np.exp(score) + easy) / 2))
    other = rollouts_of([1, 0, 1, 0], [0, 0, 1, 1], [2, 1, 1, 2], prompt_rows=[2, 0])
    found = method.advantages(other, np.array([1.0, 1, -1, 1, -1, -1]), RNG)
    weight = method.weights()[1]
    assert found == pytest.approx([weight, weight, -weight, 1, -1, -1])
    replayed = step.with_columns(replayed=True)
    before = method.state.rates.copy()
    method.observe(replayed)
    assert (method.state.rates == before).all()


def test_a_prompt_stays_in_its_bin_within_the_hysteresis() -> None:
    settings = gdro.Settings(width=0.1, hysteresis=0.02)
    assert [bin_of(rate, -1, settings) for rate in (0.0, 0.099, 0.1, 0.3, 0.95, 1.0)] == [
        0, 0, 1, 3, 9, 9
    ]  # fmt: skip
    assert [bin_of(rate, 3, settings) for rate in (0.27, 0.29, 0.35, 0.41, 0.43)] == [2, 3, 3, 3, 4]
    assert len(gdro_of(width=0.3).state.scores) == 4
