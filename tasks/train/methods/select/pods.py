"""`pods`: of each group the subset of rollouts with the largest variance of rewards (PODS, arXiv
2504.13818): generate many, train on few.

Some subset of the largest variance consists of the k largest and the m - k smallest rewards, so one
sort and prefix sums find it in O(n log n). Ties follow the rule of the authors' code: the m
largest, unless fewer of them have a strictly larger variance, the fewest first. Among equal rewards
the order decides. The estimator changes: on the kept set the mean no longer estimates the pass rate
(see train.advantage_over)."""

import numpy as np

from tasks.train.methods.select.keep import EXAMPLE, Settings, keep_in_groups
from tasks.train.rollouts import Bools, Floats, Ints, Rollouts
from tasks.train.slots import Select

__all__ = ["EXAMPLE", "Method", "Settings"]


class Method(Select):
    def __init__(self, settings: Settings) -> None:
        self.keep = settings.keep

    def __call__(self, rollouts: Rollouts, rng: np.random.Generator) -> Bools:
        """Return [B] whether a rollout is in its group's `keep` with the largest variance."""

        def most_varied(rows: Ints) -> Ints:
            return max_variance(rollouts.rewards_B[rows], self.keep)

        return keep_in_groups(rollouts.group_B, self.keep, most_varied)


def max_variance(rewards: Floats, keep: int) -> Ints:
    """Return the places of the `keep` rewards with the largest variance."""
    order = np.argsort(rewards, kind="stable")
    centred = rewards[order] - rewards.mean()  # the sums of squares then keep their precision
    sums, squares = (np.concatenate([[0.0], np.cumsum(values)]) for values in (centred, centred**2))
    largest = np.arange(keep + 1)  # the number from the top; the others are from the bottom
    first = len(rewards) - largest
    total = sums[-1] - sums[first] + sums[keep - largest]
    variance = (squares[-1] - squares[first] + squares[keep - largest]) / keep - (total / keep) ** 2
    best = keep
    for k in range(keep):
        if variance[k] > variance[best] + 1e-12 * max(abs(variance[best]), 1.0):
            best = k
    return np.concatenate([order[: keep - best], order[len(rewards) - best :]])
