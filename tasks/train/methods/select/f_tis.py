"""`f_tis`: drop a rollout of another policy if its reward is at most its group's mean and it is too
far from the current policy (F-TIS, arXiv 2605.22537; from summaries).

A rollout is kept if its reward is above its group's mean or its KL(policy | sampler) is below
`limit`. The KL is estimated from the rollout itself, token by token: r log r - (r - 1) with r the
ratio of policy to sampler. The estimate is never negative and, given a prefix that the sampler
wrote, unbiased for each token. Rollouts of the current policy are all kept. The truncation in the
method's name is `train.correction: {level: token, cap: 2.0}`."""

import numpy as np

from tasks.common.params import above_zero, settings
from tasks.train.data.columns import Bools, Floats
from tasks.train.data.groups import group_means
from tasks.train.data.rollouts import Features, Rollouts
from tasks.train.slots import Select


@settings
class Settings:
    limit: float = 50.0  # maximum KL from the current policy, in nats

    def __post_init__(self) -> None:
        above_zero(train__select__limit=self.limit)


class Method(Select):
    settings: Settings
    features = Features()

    def __call__(self, rollouts: Rollouts, rng: np.random.Generator) -> Bools:
        if not len(rollouts.group_B):
            return np.zeros(0, dtype=np.bool_)
        mean_Q, _ = group_means(rollouts.rewards_B, rollouts.group_B)
        is_better_B = rollouts.rewards_B > mean_Q[rollouts.group_B]
        return np.asarray(is_better_B | (divergence(rollouts) < self.settings.limit))


def divergence(rollouts: Rollouts) -> Floats:
    """Return [B] the estimated KL(policy | sampler) of each rollout, in nats."""
    assert rollouts.observed is not None
    log_ratio_N = np.clip(rollouts.observed.logprobs_N - rollouts.logprobs_N, -50.0, 50.0)
    ratio_N = np.exp(log_ratio_N)
    terms_N = (ratio_N * log_ratio_N - (ratio_N - 1.0)) * rollouts.trained_N()
    return np.asarray(
        np.bincount(rollouts.owner_N(), terms_N, len(rollouts.group_B)), dtype=np.float64
    )
