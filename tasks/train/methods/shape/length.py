"""`length`: reward the shorter completions of a group (Kimi k1.5, arXiv 2501.12599).

With x from 1/2 for the shortest to -1/2 for the longest completion of the group, a correct rollout
gains `weight` * x, and a wrong one only if x is negative. Groups of equal lengths are unchanged."""

import numpy as np

from tasks.common.params import above_zero, settings
from tasks.train.data.columns import Floats
from tasks.train.data.groups import extremes
from tasks.train.data.rollouts import Rollouts
from tasks.train.slots import Shape


@settings
class Settings:
    weight: float = 0.1  # weight of the length relative to the reward

    def __post_init__(self) -> None:
        above_zero(train__shape__weight=self.weight)


class Method(Shape):
    settings: Settings
    changes_rewards = True

    def rewards(self, rollouts: Rollouts, max_tokens: int) -> Floats:
        own_N = rollouts.owner_N()[rollouts.trained_N()]
        length_B = np.bincount(own_N, minlength=len(rollouts.group_B)).astype(np.float64)
        group_B, num_groups = rollouts.group_B, len(rollouts.prompt_rows_Q)
        least_B, most_B = (ends_Q[group_B] for ends_Q in extremes(length_B, group_B, num_groups))
        share_B = (length_B - least_B) / np.where(most_B > least_B, most_B - least_B, 1.0)
        x_B = np.where(most_B > least_B, 0.5 - share_B, 0.0)
        gain_B = np.where(rollouts.is_correct_B(), x_B, np.minimum(x_B, 0.0))
        return np.asarray(rollouts.rewards_B + self.settings.weight * gain_B)
