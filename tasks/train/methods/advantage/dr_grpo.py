"""`dr_grpo`: the reward against its group's mean, not divided by a deviation (Dr. GRPO, arXiv
2503.20783)."""

import numpy as np

from tasks.train.rollouts import Floats, Ints, group_means, mixed_groups


def advantage(rewards_B: Floats, group_B: Ints) -> Floats:
    """[B] advantages; exactly 0 in a group whose rewards are all equal, a group of one among
    them."""
    mean_Q, _ = group_means(rewards_B, group_B)
    mixed_Q = mixed_groups(rewards_B, group_B, len(mean_Q))
    return np.where(mixed_Q[group_B], rewards_B - mean_Q[group_B], 0.0)
