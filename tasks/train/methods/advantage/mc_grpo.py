"""`mc_grpo`: the reward minus its group's median, divided by the median absolute deviation (arXiv
2601.22582).

Meant for odd groups, whose median has advantage 0. With binary rewards the deviation of an odd
group is always 0, and the published rule (deviation + 0.001) gives the minority +1000 or -1000,
bounded only by gradient clipping. `min_deviation` avoids this: with 1.0, binary rewards are only
centred on the median; 0.001 is close to the published rule. The median rollout is not trained on,
nor are others at the median. All count in the loss's denominator; the paper counts one fewer.
"""

import numpy as np

from tasks.common.params import above_zero, settings
from tasks.train.data.columns import Floats, Ints
from tasks.train.data.groups import mixed_groups
from tasks.train.data.rollouts import Rollouts
from tasks.train.slots import Advantage


@settings
class Settings:
    min_deviation: float = 1.0  # minimum divisor of a group's advantages

    def __post_init__(self) -> None:
        above_zero(train__advantage__min_deviation=self.min_deviation)


class Method(Advantage):
    settings: Settings
    skips_zeros = True

    def __call__(self, rollouts: Rollouts) -> Floats:
        return advantage(
            rollouts.rewards_B, rollouts.group_B, min_deviation=self.settings.min_deviation
        )


def advantage(rewards_B: Floats, group_B: Ints, *, min_deviation: float) -> Floats:
    """Return [B] advantages; exactly 0 in a group with equal rewards, including a group of one."""
    num_groups = int(group_B.max(initial=-1)) + 1
    centred_B = rewards_B - group_medians(rewards_B, group_B, num_groups)[group_B]
    deviation_Q = np.maximum(group_medians(np.abs(centred_B), group_B, num_groups), min_deviation)
    mixed_Q = mixed_groups(rewards_B, group_B, num_groups)
    return np.where(mixed_Q[group_B], centred_B / deviation_Q[group_B], 0.0)


def group_medians(values_B: Floats, group_B: Ints, num_groups: int) -> Floats:
    """Return [Q] the median of each group, 0 for one without rows."""
    order = np.lexsort((values_B, group_B))
    sorted_B = values_B[order]
    size_Q = np.bincount(group_B, minlength=num_groups)
    first_Q = np.cumsum(size_Q) - size_Q
    medians = np.zeros(num_groups)
    some = size_Q > 0
    low, high = first_Q[some] + (size_Q[some] - 1) // 2, first_Q[some] + size_Q[some] // 2
    medians[some] = (sorted_B[low] + sorted_B[high]) / 2
    return medians
