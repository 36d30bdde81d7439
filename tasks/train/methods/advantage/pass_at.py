"""`pass_at`: a rollout's contribution to pass@k (arXiv 2505.15201).

In a group of n rollouts with c correct, a rollout's score is its share in the unbiased estimate of
pass@k over all subsets of k. A correct rollout has k/n. A wrong one has k/n times the probability
that k - 1 random others include a correct one. The advantage is the score minus a baseline from the
subsets without the rollout: (n - 1) / (n - k) times the score minus the mean of the others' scores
(`rloo`), which are partly from subsets with it. So the expected gradient is that of pass@k. A group
of at most k rollouts has no gradient: all of them have the same score. Outcomes count, not
rewards."""

import numpy as np
import numpy.typing as npt

from tasks.common.params import at_least, settings
from tasks.common.statistics import pass_at_k
from tasks.train.data.columns import Floats, Ints
from tasks.train.data.rollouts import Rollouts
from tasks.train.methods.advantage import rloo
from tasks.train.slots import Advantage


@settings
class Settings:
    k: int = 4  # the k of pass@k

    def __post_init__(self) -> None:
        at_least(1, train__advantage__k=self.k)


EXAMPLE = Settings(k=2)


class Method(Advantage):
    unshaped = True

    def __init__(self, settings: Settings) -> None:
        self.k, self.min_group = settings.k, settings.k + 1

    def __call__(self, rollouts: Rollouts) -> Floats:
        group_B = rollouts.group_B
        size_B = np.bincount(group_B)[group_B]
        scores_B = scores(rollouts.is_correct_B(), group_B, self.k)
        factor_B = (size_B - 1) / np.maximum(size_B - self.k, 1)
        return np.asarray(factor_B * rloo.advantage(scores_B, group_B))


def scores(is_correct_B: npt.NDArray[np.bool_], group_B: Ints, k: int) -> Floats:
    """Return [B] each rollout's share in pass@k; over a group they sum to k times pass@k."""
    size_Q = np.bincount(group_B)
    correct_Q, k_Q = np.bincount(group_B, is_correct_B), np.minimum(size_Q, k)
    wrong_Q = np.zeros(len(size_Q))
    for size in np.unique(k_Q[k_Q > 0]):
        rows = np.flatnonzero(k_Q == size)
        wrong_Q[rows] = pass_at_k(correct_Q[rows], size_Q[rows] - 1, int(size) - 1)
    share_Q = k_Q / np.maximum(size_Q, 1)
    return np.asarray(np.where(is_correct_B, 1.0, wrong_Q[group_B]) * share_Q[group_B])
