"""`rloo`: the reward minus the mean of the *other* rollouts of its group (RLOO, arXiv 2402.14740).

It is Dr. GRPO's advantage times G / (G - 1): a rollout's own reward is not in its baseline.
"""

import numpy as np

from tasks.train.data.columns import Floats, Ints
from tasks.train.data.groups import centred_rewards, group_means
from tasks.train.data.rollouts import Rollouts
from tasks.train.slots import Advantage


class Method(Advantage):
    def __call__(self, rollouts: Rollouts) -> Floats:
        return advantage(rollouts.rewards_B, rollouts.group_B)


def advantage(rewards_B: Floats, group_B: Ints) -> Floats:
    """Return [B] advantages; 0 in a group with equal rewards, and in a group of one, which has no
    other rollouts."""
    _, size_Q = group_means(rewards_B, group_B)
    others_B = np.maximum(size_Q[group_B] - 1, 1)
    return np.asarray(centred_rewards(rewards_B, group_B) * size_Q[group_B] / others_B)
