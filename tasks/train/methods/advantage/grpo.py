"""`grpo`: the reward minus its group's mean, divided by the group's standard deviation (arXiv
2402.03300).

The deviation is the population standard deviation, as in sGPO's derivation: with binary rewards
each of n successes among G gets sqrt((G - n) / n), and a mixed pair exactly +1 and -1. TRL and verl
divide by the sample standard deviation, which `grpo_sample` does.

With the other scales one divisor applies to the whole step, so that balanced groups are not scaled
down relative to others. For `batch` it is the sample deviation of the step's rewards (Lite PPO,
arXiv 2508.08221), for `centred` the population deviation of the rewards minus their groups' means
(ScaleRL, arXiv 2510.13786). Groups with equal rewards make the second smaller, so the advantages
grow as such groups become more frequent. Without a divisor the advantage is `dr_grpo`'s."""

from typing import Literal

import numpy as np

from tasks.common.params import settings
from tasks.train.data.columns import Floats, Ints
from tasks.train.data.groups import centred_rewards, group_means
from tasks.train.data.rollouts import Rollouts
from tasks.train.slots import Advantage


@settings
class Settings:
    scale: Literal["group", "batch", "centred"] = "group"  # rewards whose deviation is the divisor


class Method(Advantage):
    settings: Settings

    def __call__(self, rollouts: Rollouts) -> Floats:
        if self.settings.scale == "group":
            return advantage(rollouts.rewards_B, rollouts.group_B)
        centred_B = centred_rewards(rollouts.rewards_B, rollouts.group_B)
        if self.settings.scale == "batch" and centred_B.any():
            return np.asarray(centred_B / rollouts.rewards_B.std(ddof=1))
        return in_deviations(centred_B)


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
