"""`kondo`: train only on the step's tokens with the largest advantage times surprise (Kondo gate,
arXiv 2603.20526; the authors' hard rule for tokens).

The priority of a token is A (-log p), where p is the sampler's probability, so no pass is needed.
Tokens of negative advantage are dropped first, so with a small `keep` only rare tokens of successes
remain. The survivors keep their weight and the divisors count every token, so the gradient is
biased. The authors use the reward minus the group's mean (`advantage: {method:
dr_grpo}`). A rollout without a surviving token is dropped; the others are computed whole. Left out:
the random gate with a price, and other priorities."""

import numpy as np

from tasks.common.params import above_zero, settings, share
from tasks.train.data.columns import Floats
from tasks.train.data.rollouts import Rollouts
from tasks.train.methods.shape.entropy_mask import of_largest
from tasks.train.slots import Shape


@settings
class Settings:
    keep: float  # share of the step's tokens; 1: all

    def __post_init__(self) -> None:
        above_zero(train__shape__keep=self.keep)
        share(train__shape__keep=self.keep)


EXAMPLE = Settings(keep=0.5)


class Method(Shape):
    settings: Settings
    skips_zeros = True

    def advantages(
        self, rollouts: Rollouts, advantages_N: Floats, rng: np.random.Generator
    ) -> Floats:
        delight_N = -advantages_N * rollouts.logprobs_N
        return of_largest(rollouts, advantages_N, delight_N, self.settings.keep)
