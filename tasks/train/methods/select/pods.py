"""`pods`: of each group the rollouts whose rewards vary most (PODS, arXiv 2504.13818): generate
many, train on few.

Some subset of the largest variance consists of the k largest and the m - k smallest rewards, so one
sort and prefix sums find it in O(n log n). Of several the rule of the authors' code decides: the m
largest, unless fewer of them give strictly more, the fewest first. Which of equal rewards is kept
is decided by their order. The estimator changes: on the kept set the mean is no estimate of the
pass rate any more (see train.advantage_over)."""

import numpy as np

from tasks.train.methods.select.keep import EXAMPLE, Settings
from tasks.train.rollouts import Bools, Floats, Ints, Rollouts, keep_in_groups
from tasks.train.slots import Select

__all__ = ["EXAMPLE", "Method", "Settings"]


class Method(Select):
    def __init__(self, settings: Settings) -> None:
        self.keep = settings.keep

    def __call__(self, rollouts: Rollouts, rng: np.random.Generator) -> Bools:
        """[B] whether a rollout is one of the `keep` of its group whose rewards vary most."""

        def most_varied(rows: Ints) -> Ints:
            return max_variance(rollouts.rewards_B[rows], self.keep)

        return keep_in_groups(rollouts.group_B, self.keep, most_varied)


def max_variance(rewards: Floats, keep: int) -> Ints:
    """The places of the `keep` rewards of the largest variance."""
    order = np.argsort(rewards, kind="stable")
    centred = rewards[order] - rewards.mean()  # sums of squares then lose no digits to the mean
    sums, squares = (np.concatenate([[0.0], np.cumsum(values)]) for values in (centred, centred**2))
    largest = np.arange(keep + 1)  # how many are taken from the top; the others from the bottom
    first = len(rewards) - largest
    total = sums[-1] - sums[first] + sums[keep - largest]
    variance = (squares[-1] - squares[first] + squares[keep - largest]) / keep - (total / keep) ** 2
    best = keep
    for k in range(keep):
        if variance[k] > variance[best] + 1e-12 * max(abs(variance[best]), 1.0):
            best = k
    return np.concatenate([order[: keep - best], order[len(rewards) - best :]])
