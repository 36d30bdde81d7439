"""`bnpo`: the reward minus its group's mean, divided by the density of a Beta distribution that is
fitted to the step's pass rates (BNPO, arXiv 2506.02864; rule from the authors' code).

For binary rewards. Beta(a, b) has the mean and sample variance of the step's group means; the
divisor is the density of Beta(max(1 + a/3, 1), max(1 + b/3, 1)) at the group's mean. With both
parameters 3/2 the advantage is GRPO's up to a factor; with both 1 it is Dr. GRPO's. A step with one
group, or equal means, has density 1. TRL's `bnpo` averages over tokens (`normalize: token`)."""

import numpy as np
from scipy import stats

from tasks.train.data.columns import Floats
from tasks.train.data.groups import ROUNDING, centred_rewards, group_means
from tasks.train.data.rollouts import Rollouts
from tasks.train.slots import Advantage

MOST = 1e6  # maximum weight of a group


class Method(Advantage):
    unshaped = True

    def __call__(self, rollouts: Rollouts) -> Floats:
        rewards_B, group_B = rollouts.rewards_B, rollouts.group_B
        mean_Q, size_Q = group_means(rewards_B, group_B)
        first, second = beta_of(mean_Q[size_Q > 0])
        centred_B = centred_rewards(rewards_B, group_B)
        is_mixed_B = centred_B != 0.0
        density_B = stats.beta.pdf(mean_Q[group_B[is_mixed_B]], first, second)
        advantages_B = np.zeros(len(rewards_B))
        advantages_B[is_mixed_B] = centred_B[is_mixed_B] * np.minimum(1.0 / density_B, MOST)
        return advantages_B


def beta_of(mean_Q: Floats) -> tuple[float, float]:
    """Return the two parameters of the density from the step's group means; 1 and 1 if they do not
    vary."""
    if len(mean_Q) < 2 or np.ptp(mean_Q) <= ROUNDING * mean_Q.max():
        return 1.0, 1.0
    variance = float(mean_Q.var(ddof=1))
    mean = float(mean_Q.mean())
    total = mean * (1.0 - mean) / variance - 1.0
    return max(1.0 + total * mean / 3.0, 1.0), max(1.0 + total * (1.0 - mean) / 3.0, 1.0)
