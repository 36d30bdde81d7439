"""`efficient`: shorter correct answers have a larger weight (arXiv 2502.04463).

A correct rollout's reward is multiplied by 1 - strength * sigmoid(z), where z is its length in the
policy's own tokens, standardised over the group's correct rollouts; the advantage is then `rloo`'s.
A group with only correct answers favours its short ones, so it has a gradient, unless all are
equally long."""

import numpy as np

from tasks.common.params import settings, share
from tasks.train.data.columns import Floats
from tasks.train.data.rollouts import Rollouts
from tasks.train.methods.advantage import rloo
from tasks.train.slots import Advantage


@settings
class Settings:
    strength: float = 0.2  # strength of the penalty for a long correct answer

    def __post_init__(self) -> None:
        share(train__advantage__strength=self.strength)


class Method(Advantage):
    settings: Settings

    def __call__(self, rollouts: Rollouts) -> Floats:
        rewards_B = rollouts.rewards_B.copy()
        lengths_B = np.bincount(rollouts.owner_N(), rollouts.trained_N(), len(rewards_B))
        is_correct_B = rollouts.is_correct_B()
        for group in np.unique(rollouts.group_B[is_correct_B]):
            rows = np.flatnonzero((rollouts.group_B == group) & is_correct_B)
            centred = lengths_B[rows] - lengths_B[rows].mean()
            z = centred / max(float(lengths_B[rows].std()), 1e-9)
            rewards_B[rows] *= 1.0 - self.settings.strength / (1.0 + np.exp(-z))
        return rloo.advantage(rewards_B, rollouts.group_B)
