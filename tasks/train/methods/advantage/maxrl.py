"""`maxrl`: the reward minus its group's mean, divided by that mean (MaxRL, arXiv 2602.02710).

Rewards are at least 0. Each of n successes among G has the advantage (G - n) / n, a failure -1, so
hard prompts weigh most: the expected gradient is the gradient of the log of the pass rate, up to
the order that G rollouts can estimate."""

from tasks.train.data.columns import Floats
from tasks.train.data.groups import centred_rewards, group_means
from tasks.train.data.rollouts import Rollouts
from tasks.train.slots import Advantage

SMALLEST = 1e-6  # added to the mean


class Method(Advantage):
    unshaped = True

    def __call__(self, rollouts: Rollouts) -> Floats:
        mean_Q, _ = group_means(rollouts.rewards_B, rollouts.group_B)
        centred_B = centred_rewards(rollouts.rewards_B, rollouts.group_B)
        return centred_B / (mean_Q[rollouts.group_B] + SMALLEST)
