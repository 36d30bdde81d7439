"""`repetition`: a penalty for repeated n-grams of tokens in a completion (arXiv 2502.03373).

The penalty is `weight` times the share of the completion's n-grams that repeat an earlier one."""

import itertools

import numpy as np

from tasks.common.params import above_zero, at_least, settings
from tasks.train.data.columns import OWN_TOKENS, Floats
from tasks.train.data.rollouts import Rollouts
from tasks.train.slots import Shape


@settings
class Settings:
    n: int = 3  # length of an n-gram in tokens
    weight: float = 1.0  # factor of the share of repeated n-grams

    def __post_init__(self) -> None:
        at_least(1, train__shape__n=self.n)
        above_zero(train__shape__weight=self.weight)


class Method(Shape):
    settings: Settings
    changes_rewards = True

    def rewards(self, rollouts: Rollouts, max_tokens: int) -> Floats:
        completions = rollouts.table.select("token_ids", OWN_TOKENS.alias("own")).rows()
        repeated_B = [repeated(turns(ids, own), self.settings.n) for ids, own in completions]
        return np.asarray(
            rollouts.rewards_B - self.settings.weight * np.array(repeated_B, np.float64)
        )


def turns(token_ids: list[int], own: list[bool]) -> list[list[int]]:
    """Return the runs of consecutive tokens that the policy wrote, such as its turns."""
    runs = itertools.groupby(zip(token_ids, own, strict=True), key=lambda pair: pair[1])
    return [[token for token, _ in run] for is_own, run in runs if is_own]


def repeated(parts: list[list[int]], n: int) -> float:
    """Return the share of all parts' n-grams that repeat an earlier one; 0 if there are none."""
    ngrams = [
        gram for part in parts for gram in zip(*(part[start:] for start in range(n)), strict=False)
    ]
    return 1.0 - len(set(ngrams)) / len(ngrams) if ngrams else 0.0
