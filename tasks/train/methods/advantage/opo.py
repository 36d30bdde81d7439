"""`opo`: the reward minus its group's length-weighted mean (OPO, arXiv 2505.23585).

This baseline minimises the variance of the gradient if the squared gradient norm of a rollout's
log-probability is proportional to its length."""

import numpy as np

from tasks.train.data.columns import Floats
from tasks.train.data.groups import mixed_groups
from tasks.train.data.rollouts import Rollouts
from tasks.train.slots import Advantage


class Method(Advantage):
    def __call__(self, rollouts: Rollouts) -> Floats:
        rewards_B, group_B = rollouts.rewards_B, rollouts.group_B
        owner_N, trained_N = rollouts.owner_N(), rollouts.trained_N()
        length_B = np.bincount(owner_N[trained_N], minlength=len(group_B))
        length_Q = np.bincount(group_B, length_B)
        baseline_Q = np.bincount(group_B, length_B * rewards_B) / np.maximum(length_Q, 1)
        is_mixed_Q = mixed_groups(rewards_B, group_B, len(length_Q))
        return np.where(is_mixed_Q[group_B], rewards_B - baseline_Q[group_B], 0.0)
