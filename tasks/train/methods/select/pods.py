"""`pods`: keep each group's subset of rollouts with the largest variance of rewards (PODS, arXiv
2504.13818): generate many, train on few.

One subset with the largest variance consists of the k largest and the m - k smallest rewards (m:
`keep`), so one sort and prefix sums find it in O(n log n). Ties follow the rule of the authors'
code: k = m if it has the largest variance, otherwise the smallest k that has it. Among equal
rewards the order decides. The estimator changes: on the kept set the mean no longer estimates the
pass rate (see train.advantage_over).

With `drop_dead` a group of equal rewards has no rollouts in the update. `train.batch.counts: kept`
still counts it as `keep` rollouts, so `drop_dead` does not change the prompts of a step."""

import numpy as np

from tasks.common.params import settings
from tasks.train.data.columns import Bools, Floats, Ints
from tasks.train.data.groups import mixed_groups
from tasks.train.data.rollouts import Rollouts
from tasks.train.methods.select import keep


@settings
class Settings(keep.Settings):
    drop_dead: bool = False  # keep no rollout of a group with equal rewards


EXAMPLE = Settings(keep=2)


class Method(keep.KeepInGroups):
    settings: Settings

    def __call__(self, rollouts: Rollouts, rng: np.random.Generator) -> Bools:
        kept_B, group_B = super().__call__(rollouts, rng), rollouts.group_B
        if not self.settings.drop_dead:
            return kept_B
        mixed_Q = mixed_groups(rollouts.rewards_B, group_B, len(rollouts.prompt_rows_Q))
        return kept_B & mixed_Q[group_B]

    def choose(self, rollouts: Rollouts, rows: Ints, rng: np.random.Generator) -> Ints:
        """Return the indices of the rewards with the largest variance."""
        return max_variance(rollouts.rewards_B[rows], self.settings.keep)


def max_variance(rewards: Floats, keep: int) -> Ints:
    """Return the indices of the subset of `keep` rewards with the largest variance."""
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
