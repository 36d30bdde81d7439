"""`reinforce_pp`: rewards whitened over all tokens of the step (REINFORCE++, arXiv 2501.03262; rule
from public code).

The mean and the sample standard deviation count each trained token once, so long rollouts weigh
more in both. `baseline: true` subtracts the mean of the group first (REINFORCE++-baseline). Without
it no group is needed, and the sign of a mediocre rollout's advantage depends on the step's other
rollouts. In both forms a rollout of a group with equal rewards has an advantage, because the mean
of the step's tokens is also subtracted."""

import numpy as np

from tasks.common.params import settings
from tasks.train.data.columns import Floats
from tasks.train.data.groups import ROUNDING, centred_rewards
from tasks.train.data.rollouts import Rollouts
from tasks.train.slots import Advantage


@settings
class Settings:
    baseline: bool = False  # first subtract the group's mean


class Method(Advantage):
    settings: Settings
    needs_group = False

    def __call__(self, rollouts: Rollouts) -> Floats:
        values_B = rollouts.rewards_B
        if self.settings.baseline:
            values_B = centred_rewards(values_B, rollouts.group_B)
        values_N = values_B[rollouts.owner_N()[rollouts.trained_N()]]
        if len(values_N) < 2 or np.ptp(values_N) <= ROUNDING * np.abs(values_N).max():
            return np.zeros(len(values_B))
        return np.asarray((values_B - values_N.mean()) / values_N.std(ddof=1))
