"""Changes of rewards and advantages: published and hand-computed values."""

from types import ModuleType
from typing import Any

import numpy as np
import pytest

from tasks.common.params import ParamsError
from tasks.train.loading import settings_of
from tasks.train.methods.shape import (
    entropy_mask,
    failures,
    length,
    overlong,
    repetition,
    signs,
    truncated,
)
from tasks.train.rollouts import Rollouts
from tests.train.steps import observed_of, rollouts_of


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
    found = shape_of(truncated).advantages(rollouts, np.array([1.0, -0.5, -0.5, -0.5]))
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
    found = shape_of(signs, positive=0.1, negative=1.0).advantages(rollouts, both)
    assert found.tolist() == [0.1, -1.0, -1.0]


def test_a_group_that_fails_learns_from_a_virtual_success() -> None:
    rollouts = rollouts_of([0.0] * 8 + [1.0, 0.0], [0] * 8 + [1] * 2)
    before = np.array([0.0] * 8 + [1.0, -1.0])
    found = shape_of(failures).advantages(rollouts, before)
    mean, deviation = 1 / 9, np.sqrt(1 / 9 * 8 / 9)  # of eight failures and one success
    assert found == pytest.approx([-mean / deviation] * 8 + [1.0, -1.0])
    assert found[0] == pytest.approx(-0.3536, abs=5e-5)


def test_a_group_that_fails_is_one_without_a_correct_rollout_whatever_shapes_made_of_rewards() -> (
    None
):
    correct = completions_of([1.0, 1.0], [1, 1]).with_columns(reward=[0.0, 0.0])
    assert shape_of(failures).advantages(correct, np.zeros(2)).tolist() == [0.0, 0.0]
    wrong = completions_of([0.0, 0.0], [1, 1]).with_columns(reward=[0.0, -0.5])
    found = shape_of(failures).advantages(wrong, np.array([1.0, -1.0]))
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
    found = shape_of(entropy_mask, keep=0.2).advantages(rollouts, np.ones(20))
    entropies = rollouts.observed.entropies_N
    assert found.sum() == 4
    assert entropies[found > 0].min() > entropies[found == 0].max()


def test_mistakes_are_named() -> None:
    with pytest.raises(ParamsError, match=r"train.shape.method is missing; there is: .*overlong"):
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
