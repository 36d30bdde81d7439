"""Changes of rewards and advantages: published and hand-computed values."""

import contextlib
import dataclasses
import itertools
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from tasks.common.params import ParamsError
from tasks.train.loading import settings_of
from tasks.train.methods.advantage import grpo, grpo_sample
from tasks.train.methods.loss import clip
from tasks.train.methods.shape import (
    cov_mask,
    cppo,
    entropy_mask,
    failures,
    kondo,
    length,
    nat,
    nll,
    novelty,
    overlong,
    pruned_po,
    repetition,
    signs,
    truncated,
)
from tasks.train.rollouts import Floats, Observed, Rollouts, StepTotals, nested
from tasks.train.tokens import Tokens
from tests.train.steps import observed_of, rollouts_of
from tests.train.worlds import Killed, dying_after, make_world, outputs, run

RNG = np.random.default_rng(0)


def shape_of(module: ModuleType, **settings: Any) -> Any:
    """The method with these settings."""
    return module.Method(module.Settings(**settings)) if settings else module.Method()


def completions_of(rewards: list[float], lengths: list[int]) -> Rollouts:
    """One group of completions of these lengths."""
    return rollouts_of(rewards, [0] * len(rewards), lengths)


def test_a_penalty_grows_towards_the_limit() -> None:
    rollouts = completions_of([0.0, 1.0, 0.0, 1.0], [40, 48, 56, 64])
    rewards = shape_of(overlong, share=0.25).rewards(rollouts, 64)
    assert rewards.tolist() == [0.0, 1.0, -0.5, 0.0]
    with pytest.raises(ParamsError, match="overlong: share is 2"):
        overlong.Settings(share=2.0)


def test_truncated_completions_are_not_learned_from() -> None:
    rollouts = completions_of([1.0, 0.0, 0.0], [1, 2, 1])
    rollouts = rollouts.with_columns(reason=["stop", "length", "stop"])
    found = shape_of(truncated).advantages(rollouts, np.array([1.0, -0.5, -0.5, -0.5]), RNG)
    assert found.tolist() == [1.0, 0.0, 0.0, -0.5]


def test_short_correct_completions_gain_and_long_ones_lose() -> None:
    rollouts = completions_of([1.0, 1.0, 1.0, 0.0], [10, 20, 40, 30])
    gains = shape_of(length, weight=1.0).rewards(rollouts, 64) - rollouts.rewards_B
    assert gains == pytest.approx([0.5, 1 / 6, -0.5, -1 / 6])
    equal = completions_of([1.0, 0.0], [5, 5])
    assert shape_of(length, weight=1.0).rewards(equal, 64).tolist() == [1.0, 0.0]


def test_repeated_ngrams_cost() -> None:
    assert repetition.repeated([[5, 5, 5, 5, 5]], 2) == 0.75
    assert repetition.repeated([[1, 2, 3]], 2) == 0.0
    assert repetition.repeated([[1]], 2) == 0.0
    own = [True, True, False, False, True, True]
    assert repetition.turns([1, 2, 1, 2, 3, 4], own) == [[1, 2], [3, 4]]
    rollouts = completions_of([1.0, 0.0], [5, 1])  # all tokens are equal
    assert shape_of(repetition, n=2, weight=1.0).rewards(rollouts, 64).tolist() == [0.25, 0.0]


def test_factors_on_both_signs() -> None:
    rollouts, both = completions_of([1.0, 0.0], [1, 2]), np.array([1.0, -1.0, -1.0])
    found = shape_of(signs, positive=0.1, negative=1.0).advantages(rollouts, both, RNG)
    assert found.tolist() == [0.1, -1.0, -1.0]


def test_a_group_that_fails_learns_from_a_virtual_success() -> None:
    rollouts = rollouts_of([0.0] * 8 + [1.0, 0.0], [0] * 8 + [1] * 2)
    before = np.array([0.0] * 8 + [1.0, -1.0])
    found = shape_of(failures).advantages(rollouts, before, RNG)
    mean, deviation = 1 / 9, np.sqrt(1 / 9 * 8 / 9)  # of eight failures and one success
    assert found == pytest.approx([-mean / deviation] * 8 + [1.0, -1.0])
    assert found[0] == pytest.approx(-0.3536, abs=5e-5)


def test_a_group_that_fails_is_one_without_a_correct_rollout_whatever_shapes_made_of_rewards() -> (
    None
):
    correct = completions_of([1.0, 1.0], [1, 1]).with_columns(reward=[0.0, 0.0])
    assert shape_of(failures).advantages(correct, np.zeros(2), RNG).tolist() == [0.0, 0.0]
    wrong = completions_of([0.0, 0.0], [1, 1]).with_columns(reward=[0.0, -0.5])
    found = shape_of(failures).advantages(wrong, np.array([1.0, -1.0]), RNG)
    assert found == pytest.approx([-(0.5**0.5)] * 2)


@pytest.mark.parametrize("name", ["maxrl", "bnpo", "pass_at", "poise", "value_probe", "posterior"])
def test_shaped_rewards_are_refused_where_they_would_be_wrong(name: str) -> None:
    advantage = {"method": name}
    with pytest.raises(ParamsError, match=f"train.advantage {name} needs the verifier's rewards"):
        settings_of({"advantage": advantage, "shape": [{"method": "overlong"}]})
    settings_of({"advantage": advantage, "shape": [{"method": "truncated"}]})


def test_tokens_of_high_entropy_are_learned_from() -> None:
    rollouts = observed_of(completions_of([1.0, 0.0], [10, 10]))
    assert rollouts.observed is not None
    found = shape_of(entropy_mask, keep=0.2).advantages(rollouts, np.ones(20), RNG)
    entropies = rollouts.observed.entropies_N
    assert found.sum() == 4
    assert entropies[found > 0].min() > entropies[found == 0].max()


def seen_as(rollouts: Rollouts, logprobs: list[float]) -> Rollouts:
    """The rollouts with these log-probabilities under the policy and the sampler."""
    logprobs_N = np.array(logprobs)
    rollouts = rollouts.with_columns(logprobs=nested(logprobs_N, rollouts.completion_tokens_B()))
    return dataclasses.replace(rollouts, observed=Observed(logprobs_N, np.zeros(len(logprobs))))


def test_correct_rollouts_that_are_rare_in_their_group_gain() -> None:
    """The mean of two tokens is taken, without the environment's token of probability e^-9."""
    logprobs = [-0.4, -0.6, -0.7, -0.3, -9.0, -0.5, -0.5, -2.0]
    rollouts = rollouts_of([1.0, 1.0, 0.0, 1.0, 1.0], [0, 0, 0, 0, 1], [2, 1, 2, 2, 1])
    own = [[True] * 2, [True], [True, False], [True] * 2, [True]]
    rollouts = seen_as(rollouts, logprobs).with_columns(is_action=own)
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
    rollouts = seen_as(rollouts, [-1.0, -5.0, 40.0, -1.0, -5.0])
    given = np.array([2.0, 2.0, 90.0, -2.0, -2.0])  # covariances 4, -4, (none), -4, 4
    one = shape_of(cov_mask, drop=2e-4)
    drawn = [one.advantages(rollouts, given, np.random.default_rng(seed)) for seed in range(20)]
    assert {tuple(np.flatnonzero(found != given)) for found in drawn} == {(0,), (4,)}
    assert all(found[found != given].tolist() == [0.0] for found in drawn)
    both = shape_of(cov_mask, drop=0.5).advantages(rollouts, given, RNG)
    assert both.tolist() == [0.0, 2.0, 90.0, -2.0, 0.0]
    outside = shape_of(cov_mask, low=4.5, high=9.0).advantages(rollouts, given, RNG)
    assert outside.tolist() == given.tolist()
    with pytest.raises(ParamsError, match="low must be below high"):
        cov_mask.Settings(low=5.0)


class Coins:
    """Numbers in [0, 1) that are given, in place of random ones."""

    def __init__(self, numbers: list[float]) -> None:
        self.numbers = numbers

    def random(self, size: int) -> Floats:
        return np.array(self.numbers[:size])


@pytest.mark.parametrize("drop", [0.5, 0.75])
def test_random_pruning_does_not_change_the_mean_advantage(drop: float) -> None:
    """The exact mean over all outcomes of the coins, in ragged groups of rollouts of two tokens;
    the variance of an advantage that may leave grows by 1 / (1 - drop)."""
    rewards, groups = [1.0, 0.0, 0.0, 0.0, 1.0, 0.0, 1.0, 0.5], [0, 0, 0, 0, 1, 1, 3, 3]
    rollouts = rollouts_of(rewards, groups, [2] * 8)
    given = grpo.advantage(rollouts.rewards_B, rollouts.group_B)[rollouts.owner_N()]
    method = shape_of(pruned_po, drop=drop)
    mean, squares, num_rows = np.zeros(16), np.zeros(16), set()
    for leaves in itertools.product([True, False], repeat=8):
        coins = Coins([0.99 if leave else 0.0 for leave in leaves])
        found = method.advantages(rollouts, given, coins)
        chance = np.prod([drop if leave else 1.0 - drop for leave in leaves])
        mean, squares = mean + chance * found, squares + chance * found**2
        num_rows.add(int((found != 0).sum() / 2))
    np.testing.assert_allclose(mean, given)
    factor = np.repeat([1.0, *[1.0 / (1.0 - drop)] * 3, 1.0, 1.0, 1.0, 1.0], 2)
    np.testing.assert_allclose(squares, factor * given**2)
    assert num_rows == {5, 6, 7, 8}


@pytest.mark.parametrize("module", [pruned_po, cppo])
def test_nothing_is_pruned_with_drop_0_and_all_is_refused(module: ModuleType) -> None:
    rollouts = rollouts_of([1.0, 0.0, 0.0, 0.0, 0.1, 0.1, 0.1], [0, 0, 0, 0, 2, 2, 2])
    given = np.array([0.3, -0.1, -0.1, -0.1, 0.1, 0.1, 0.1])
    found = shape_of(module, drop=0.0).advantages(rollouts, given, RNG)
    assert found.tolist() == given.tolist()
    with pytest.raises(ParamsError, match="drop is 1; it is at least 0 and below 1"):
        module.Settings(drop=1.0)


def test_equal_advantages_are_not_pruned_for_the_rounding_of_their_mean() -> None:
    rollouts, given = rollouts_of([0.0] * 3, [0] * 3), np.full(3, 0.1)
    assert sum(given) / 3 > 0.1
    found = shape_of(pruned_po, drop=0.9).advantages(rollouts, given, Coins([0.99] * 3))
    assert found.tolist() == given.tolist()


def test_the_largest_advantages_of_each_group_stay() -> None:
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
def test_tokens_of_much_delight_are_learned_from(keep: float, expected: list[float]) -> None:
    """The priorities are .1, 2, (an environment's 9), -.5 and -3."""
    rollouts = completions_of([1.0, 0.0], [3, 2])
    rollouts = rollouts.with_columns(is_action=[[True, True, False], [True, True]])
    rollouts = seen_as(rollouts, [-0.1, -2.0, -9.0, -0.5, -3.0])
    given = np.array([1.0, 1.0, 1.0, -1.0, -1.0])
    found = shape_of(kondo, keep=keep).advantages(rollouts, given, RNG)
    assert found.tolist() == expected


def prefix(whole: float, lengths: list[int], numbers: list[float]) -> Floats:
    """The weights of the tokens of completions whose cuts these numbers draw."""
    rollouts = completions_of([1.0] * len(lengths), lengths)
    found: Floats = shape_of(nat, whole=whole).advantages(
        rollouts, np.ones(sum(lengths)), Coins(numbers)
    )
    return found


@pytest.mark.parametrize("whole", [0.0, 0.5, 0.75])
def test_the_mean_over_all_prefixes_is_the_whole_completion(whole: float) -> None:
    """The numbers are the middles of equal cells, of which each cut has a whole number."""
    numbers = [(cell + 0.5) / 60 for cell in range(60)]
    drawn = [prefix(whole, [5, 3, 1], [number] * 3) for number in numbers]
    np.testing.assert_allclose(np.mean(drawn, axis=0), np.ones(9))
    kept = np.mean([found > 0 for found in drawn], axis=0)
    chances = [whole + (1 - whole) * share for share in (1, 0.8, 0.6, 0.4, 0.2)]
    np.testing.assert_allclose(kept[:5], chances)
    ends = {tuple(np.flatnonzero(found[:5] > 0)) for found in drawn}
    assert ends == {tuple(range(end)) for end in range(1, 6)}


def test_an_atom_bounds_the_weights_of_a_long_completion() -> None:
    """Of 1,000 tokens without an atom, by the published figures: half stays, the mean weight is
    7.49 and the largest 1,000."""
    weights = prefix(0.0, [1000], [0.0])
    assert weights.mean() == pytest.approx(7.49, abs=0.01)
    assert weights.max() == pytest.approx(1000)
    assert (1 / weights).mean() == pytest.approx(0.5, abs=1e-3)
    assert prefix(0.25, [1000], [0.0]).max() == pytest.approx(4, rel=0.01)
    assert prefix(1.0, [3, 2], [0.0, 0.999]).tolist() == [1.0] * 5


@pytest.mark.parametrize(
    ("changes", "reads"),
    [
        ({"loss": {"method": "gmpo"}}, "train.loss.method gmpo"),
        ({"loss": {"method": "vespo"}}, "train.loss.method vespo"),
        ({"loss": {"method": "clip", "ratio": "sequence"}}, "train.loss.ratio sequence"),
        ({"loss": {"method": "sapo"}}, "train.loss.normalize sequence"),
        ({"correction": {"level": "geometric"}}, "train.correction.level geometric"),
        ({"correction": {"reject": {"whole_rows": True}}}, "train.correction.reject.whole_rows"),
    ],
)
def test_losses_of_whole_completions_are_refused_with_prefixes(
    changes: dict[str, Any], reads: str
) -> None:
    with pytest.raises(ParamsError, match=f"train.shape nat trains on a part.*{reads}"):
        settings_of({"shape": [{"method": "nat"}], **changes})
    settings_of(changes)
    settings_of({"shape": [{"method": "nat"}], "loss": {"method": "clip", "normalize": "prompt"}})


@pytest.mark.parametrize("name", ["pruned_po", "cppo", "kondo", "nat"])
def test_a_divisor_of_the_rest_and_a_kl_term_are_refused_with_pruning(name: str) -> None:
    shape = [{"method": name, **({"keep": 0.5} if name == "kondo" else {})}]
    for other in ({"divisor": "kept"}, {"kl_coefficient": 0.1}):
        with pytest.raises(ParamsError, match=f"train.shape {name} drops rollouts of advantage 0"):
            settings_of({"shape": shape, **other})
    settings_of({"shape": shape})


def test_mistakes_are_named() -> None:
    with pytest.raises(ParamsError, match=r"train.shape.method is missing; use one of .*overlong"):
        settings_of({"shape": [{"share": 0.5}]})
    with pytest.raises(ParamsError, match="share"):
        settings_of({"shape": [{"method": "overlong", "shares": 0.5}]})
    assert settings_of({"shape": [{"method": "length"}]}).shape == [
        {"method": "length", "weight": 0.1}
    ]


def test_completions_of_one_length_are_like_any_others() -> None:
    rollouts = completions_of([1.0, 0.0], [2, 2])
    learned = rollouts.estimated(np.array([True, True]), np.array([0.5, 0.5, -0.5, 0.0]))
    assert learned.advantages_N.tolist() == [0.5, 0.5, -0.5, 0.0]
    assert learned.has_advantage_B().tolist() == [True, True]


# --- nll


def test_correct_rollouts_are_imitated() -> None:
    """With an average over all tokens, the mean log-probability of the correct ones is raised."""
    rollouts = rollouts_of([1.0, 0.0, 1.0, 1.0], [0, 0, 1, 1], [2, 3, 1, 2])
    own = [[True, False], [True] * 3, [True], [True] * 2]
    rollouts = rollouts.with_columns(is_action=own)
    given = np.array([1.0, 1.0, -1.0, -1.0, -1.0, 0.0, 0.0, 0.0])
    found = shape_of(nll, weight=0.5).advantages(rollouts, given, RNG)
    share = 7 / 4  # own tokens, and those of correct rollouts
    more = 0.5 * share * np.array([1, 0, 0, 0, 0, 1, 1, 1])
    np.testing.assert_allclose(found, given + more)
    logs = torch.linspace(-2.0, -0.5, 8, dtype=torch.float64).requires_grad_()
    trained_N = torch.from_numpy(rollouts.trained_N())
    row_N = torch.from_numpy(rollouts.owner_N())[trained_N]
    ones = torch.ones(7, dtype=torch.float64)
    both = []
    for advantages in (found, given):
        gains = torch.from_numpy(advantages)[trained_N]
        tokens = Tokens(logs[trained_N], logs.detach()[trained_N], ones, gains, row_N, 4)
        loss, _ = clip.Method(clip.Settings())(tokens, StepTotals(7, 4, 9))
        both.append(torch.autograd.grad(loss, logs)[0])
    term = -0.5 * logs[torch.from_numpy(more > 0)].mean()
    (expected,) = torch.autograd.grad(term, logs)
    torch.testing.assert_close(both[0] - both[1], expected)
    none = completions_of([0.0, 0.0], [1, 1])
    assert shape_of(nll, weight=1.0).advantages(none, np.ones(2), RNG).tolist() == [1.0, 1.0]
    with pytest.raises(ParamsError, match=r"train.shape.weight is -1"):
        nll.Settings(weight=-1)


def test_a_killed_run_goes_on_with_the_states_of_its_shapes(guesser: Path, tmp_path: Path) -> None:
    shapes = [{"method": "truncated"}, {"method": "gdro", "width": 0.3}, {"method": "gdro"}]
    changes = {"shape": shapes, "learning_rate": 1e-2}
    layouts = [make_world(tmp_path / side, guesser, [4, 2, 6] * 6) for side in ("whole", "killed")]
    whole = run(layouts[0], changes)
    assert whole.slots.shape[1].state.steps.sum() > 5
    for last in (1, 3):
        with dying_after(last) as dying, contextlib.suppress(Killed):
            run(layouts[1], changes, prepare=dying)
    killed = run(layouts[1], changes)
    first, second = map(outputs, layouts)
    assert first == second
    for place in (1, 2):
        mine, theirs = (vars(each.slots.shape[place].state) for each in (whole, killed))
        assert all((mine[name] == theirs[name]).all() for name in mine)
