"""`grpo`: the reward against its group's mean, in units of the group's standard deviation (arXiv 2402.03300).

The population standard deviation, as sGPO's derivation has it: with binary rewards a success among n of G gets
sqrt((G - n) / n), and a mixed pair exactly +1 and -1.
"""

import numpy as np

from tasks.train.batch import Floats, Ints, mixed_groups


def advantage(rewards_B: Floats, group_B: Ints) -> Floats:
    """[B] advantages; exactly 0 in a group whose rewards are all equal, a group of one among them."""
    num_groups = int(group_B.max(initial=-1)) + 1
    size = np.maximum(np.bincount(group_B, minlength=num_groups), 1)
    mean = np.bincount(group_B, rewards_B, num_groups) / size
    centred = rewards_B - mean[group_B]
    deviation = np.sqrt(np.bincount(group_B, centred**2, num_groups) / size)
    mixed = mixed_groups(rewards_B, group_B, num_groups)
    return np.where(mixed[group_B], centred / np.where(mixed, deviation, 1.0)[group_B], 0.0)
