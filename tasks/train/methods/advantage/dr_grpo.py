"""`dr_grpo`: the reward minus its group's mean, not divided by its standard deviation (Dr. GRPO,
arXiv 2503.20783)."""

from tasks.train.data.columns import Floats
from tasks.train.data.groups import centred_rewards
from tasks.train.data.rollouts import Rollouts
from tasks.train.slots import Advantage


class Method(Advantage):
    def __call__(self, rollouts: Rollouts) -> Floats:
        return centred_rewards(rollouts.rewards_B, rollouts.group_B)
