"""`novelty`: correct rollouts that are less likely than their group's average weigh more (XRPO's
novelty sharpening, arXiv 2510.06672; rule from summaries).

With s the mean log-probability of a rollout's own tokens under the policy, a correct rollout of
advantage A > 0 gains weight * (1 - exp(s - mean s of the group)), at least 0 and at most `limit`
times A. The log-probabilities cost a pass over the step's rollouts, which is charged as scoring."""

import numpy as np

from tasks.common.params import at_least, settings
from tasks.train.data.columns import Floats
from tasks.train.data.groups import group_means
from tasks.train.data.rollouts import Features, Rollouts
from tasks.train.slots import Shape


@settings
class Settings:
    weight: float = 2.5  # factor of the novelty
    limit: float = 0.5  # maximum gain, as a share of the advantage

    def __post_init__(self) -> None:
        at_least(0, train__shape__weight=self.weight, train__shape__limit=self.limit)


class Method(Shape):
    settings: Settings
    features = Features()

    def advantages(
        self, rollouts: Rollouts, advantages_N: Floats, rng: np.random.Generator
    ) -> Floats:
        assert rollouts.observed is not None
        mean_B = rollouts.own_means_B(rollouts.observed.logprobs_N)
        group_Q, _ = group_means(mean_B, rollouts.group_B)
        gap_B = np.minimum(mean_B - group_Q[rollouts.group_B], 0.0)
        gain_B = -self.settings.weight * np.expm1(gap_B) * rollouts.is_correct_B()
        most_N = self.settings.limit * np.maximum(advantages_N, 0.0)
        return np.asarray(advantages_N + np.minimum(gain_B[rollouts.owner_N()], most_N))
