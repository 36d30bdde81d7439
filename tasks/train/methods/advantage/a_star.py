"""`a_star`: the reward minus the prompt's optimal value (A*-PO, arXiv 2505.20686).

The optimal value of the reward under a KL penalty is V* = beta log E exp(reward / beta), where E is
the mean over rollouts of the initial policy, here over the profile's samples. So no group is
needed: one rollout per prompt suffices. V* is at least the mean reward, so the mean advantage is
negative. A prompt without a graded sample has no value, and advantage 0."""

import numpy as np

from tasks.common.params import above_zero, settings
from tasks.train.data.columns import Floats, Ints
from tasks.train.data.profile import Profile
from tasks.train.data.rollouts import Rollouts
from tasks.train.slots import Advantage

reads_profile = True
reads_groups = True


@settings
class Settings:
    beta: float = 0.5  # temperature of the value: small for the best sample, large for the mean

    def __post_init__(self) -> None:
        above_zero(train__advantage__beta=self.beta)


class Method(Advantage):
    needs_group = False
    unshaped = True

    def __init__(self, settings: Settings, profile: Profile) -> None:
        graded = (profile.samples["outcome"] != "error").to_numpy()
        rewards = profile.samples["reward"].to_numpy()[graded]
        num = len(profile.prompts)
        self.values_P = optimal_values(rewards, profile.rows[graded], num, settings.beta)

    def __call__(self, rollouts: Rollouts) -> Floats:
        values_B = self.values_P[rollouts.prompt_rows_Q[rollouts.group_B]]
        return np.where(np.isnan(values_B), 0.0, rollouts.rewards_B - values_B)


def optimal_values(rewards: Floats, rows: Ints, num: int, beta: float) -> Floats:
    """Return beta log mean exp(reward / beta) of each of `num` prompts, NaN for one without a
    sample; `rows` is the prompt of each reward."""
    highest_P = np.full(num, -np.inf)
    np.maximum.at(highest_P, rows, rewards)
    sums_P = np.bincount(rows, np.exp((rewards - highest_P[rows]) / beta), num)
    sizes_P = np.bincount(rows, minlength=num)
    means_P = np.divide(sums_P, sizes_P, out=np.ones(num), where=sizes_P > 0)
    return np.where(sizes_P > 0, highest_P + beta * np.log(means_P), np.nan)
