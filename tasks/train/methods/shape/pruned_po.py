"""`pruned_po`: rollouts of small advantage are dropped at random, and those that stay weigh more to
compensate (dynamic pruning, arXiv 2603.04135, there called DPPO; reconstructed from summaries).

A rollout with a mean |advantage| below its group's mean stays with probability 1 - `drop`, and its
advantage is then divided by that probability. So the expected gradient is unchanged for a loss that
is proportional to the advantage. Other rollouts stay as they are. (A *median* in place of the mean
would prune nothing with binary rewards: no rollout is below it.) Left out: pruning of prompts
before they are sampled, and the packing of pruned batches."""

import numpy as np

from tasks.common.params import ParamsError, settings
from tasks.train.data.columns import Floats
from tasks.train.data.groups import ROUNDING, group_means
from tasks.train.data.rollouts import Rollouts
from tasks.train.slots import Shape


@settings
class Settings:
    drop: float = 0.5  # share of a group (cppo), or of its small advantages, to drop

    def __post_init__(self) -> None:
        if not 0.0 <= self.drop < 1.0:
            raise ParamsError(f"train.shape: drop is {self.drop:g}; it is at least 0 and below 1")


class Method(Shape):
    settings: Settings
    skips_zeros = True

    def advantages(
        self, rollouts: Rollouts, advantages_N: Floats, rng: np.random.Generator
    ) -> Floats:
        size_B = rollouts.own_means_B(np.abs(advantages_N))
        mean_Q, _ = group_means(size_B, rollouts.group_B)
        is_small_B = size_B < (1.0 - ROUNDING) * mean_Q[rollouts.group_B]
        chance = 1.0 - self.settings.drop
        stays_B = rng.random(len(size_B)) < chance
        weight_B = np.where(is_small_B, stays_B / chance, 1.0)
        return np.asarray(advantages_N * weight_B[rollouts.owner_N()])
