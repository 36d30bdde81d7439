"""`grpo`: the reward minus its group's mean, divided by the group's standard deviation (arXiv
2402.03300).

The deviation is the population standard deviation, as in sGPO's derivation: with binary rewards
each of n successes among G gets sqrt((G - n) / n), and a mixed pair exactly +1 and -1. With `scale:
batch` the divisor is the deviation of all centred rewards of the step (ScaleRL, arXiv 2510.13786;
Lite PPO, arXiv 2508.08221), so that balanced groups are not scaled down relative to others. Without
a divisor the advantage is `dr_grpo`'s."""

from typing import Literal

import numpy as np

from tasks.common.params import settings
from tasks.train.rollouts import Floats, Ints, Rollouts, centred_rewards, group_means
from tasks.train.slots import Advantage


@settings
class Settings:
    scale: Literal["group", "batch"] = "group"  # the divisor is its standard deviation


class Method(Advantage):
    settings: Settings

    def __call__(self, rollouts: Rollouts) -> Floats:
        if self.settings.scale == "group":
            return advantage(rollouts.rewards_B, rollouts.group_B)
        return in_deviations(centred_rewards(rollouts.rewards_B, rollouts.group_B))


def in_deviations(centred_B: Floats) -> Floats:
    """Return [B] values divided by their standard deviation; zeros if all are 0."""
    return centred_B / centred_B.std() if centred_B.any() else centred_B


def advantage(rewards_B: Floats, group_B: Ints) -> Floats:
    """Return [B] advantages; exactly 0 in a group with equal rewards, including a group of one."""
    centred_B = centred_rewards(rewards_B, group_B)
    variance_Q, _ = group_means(centred_B**2, group_B)
    deviation_B = np.sqrt(variance_Q)[group_B]
    return np.asarray(
        np.divide(centred_B, deviation_B, out=np.zeros_like(centred_B), where=centred_B != 0.0)
    )
