"""`grpo_sample`: GRPO as in the code of PODS, TRL and verl: the divisor is the sample standard
deviation plus `epsilon`.

A mixed pair has the advantages +-0.707, not +-1; in groups of eight they are 0.935 times `grpo`'s.
"""

import numpy as np

from tasks.common.params import at_least, settings
from tasks.train.data.columns import Floats, Ints
from tasks.train.data.groups import centred_rewards, group_means
from tasks.train.data.rollouts import Rollouts
from tasks.train.slots import Advantage


@settings
class Settings:
    epsilon: float = 1.0e-4  # added to the deviation

    def __post_init__(self) -> None:
        at_least(0, train__advantage__epsilon=self.epsilon)


class Method(Advantage):
    settings: Settings

    def __call__(self, rollouts: Rollouts) -> Floats:
        return advantage(rollouts.rewards_B, rollouts.group_B, epsilon=self.settings.epsilon)


def advantage(rewards_B: Floats, group_B: Ints, *, epsilon: float) -> Floats:
    """Return [B] advantages; exactly 0 in a group with equal rewards, including a group of one."""
    centred_B = centred_rewards(rewards_B, group_B)
    variance_Q, size_Q = group_means(centred_B**2, group_B)
    deviation_Q = np.sqrt(variance_Q * size_Q / np.maximum(size_Q - 1, 1))
    deviation_B = deviation_Q[group_B] + epsilon
    return np.asarray(
        np.divide(centred_B, deviation_B, out=np.zeros_like(centred_B), where=centred_B != 0.0)
    )
