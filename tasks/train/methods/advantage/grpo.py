"""`grpo`: the reward against its group's mean, in units of the group's standard deviation (arXiv
2402.03300).

The population standard deviation, as sGPO's derivation has it: with binary rewards a success among
n of G gets sqrt((G - n) / n), and a mixed pair exactly +1 and -1."""

import numpy as np

from tasks.train.rollouts import Floats, Ints, Rollouts, centred_rewards, group_means
from tasks.train.slots import Advantage


class Method(Advantage):
    def __call__(self, rollouts: Rollouts) -> Floats:
        return advantage(rollouts.rewards_B, rollouts.group_B)


def advantage(rewards_B: Floats, group_B: Ints) -> Floats:
    """[B] advantages; exactly 0 in a group whose rewards are all equal, a group of one among
    them."""
    centred_B = centred_rewards(rewards_B, group_B)
    variance_Q, _ = group_means(centred_B**2, group_B)
    deviation_B = np.sqrt(variance_Q)[group_B]
    return np.asarray(
        np.divide(centred_B, deviation_B, out=np.zeros_like(centred_B), where=centred_B != 0.0)
    )
