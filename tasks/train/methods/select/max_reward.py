"""`max_reward`: the best rollouts of each group: a control for `pods`, known to perform badly
(arXiv 2504.13818)."""

import numpy as np

from tasks.train.methods.select.keep import EXAMPLE, Settings, keep_in_groups
from tasks.train.rollouts import Bools, Ints, Rollouts
from tasks.train.slots import Select

__all__ = ["EXAMPLE", "Method", "Settings"]


class Method(Select):
    settings: Settings

    def __call__(self, rollouts: Rollouts, rng: np.random.Generator) -> Bools:
        """Return [B] whether a rollout is among the `keep` of its group with the largest rewards.
        Of equal rewards, the first ones are kept."""

        def best(rows: Ints) -> Ints:
            return np.argsort(-rollouts.rewards_B[rows], kind="stable")[: self.settings.keep]

        return keep_in_groups(rollouts.group_B, self.settings.keep, best)
