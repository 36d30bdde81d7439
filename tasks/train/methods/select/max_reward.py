"""`max_reward`: the best rollouts of each group, for comparison with `pods`; it is known to perform
badly (arXiv 2504.13818)."""

import numpy as np

from tasks.train.data.columns import Ints
from tasks.train.data.rollouts import Rollouts
from tasks.train.methods.select.keep import EXAMPLE, KeepInGroups, Settings

__all__ = ["EXAMPLE", "Method", "Settings"]


class Method(KeepInGroups):
    def choose(self, rollouts: Rollouts, rows: Ints, rng: np.random.Generator) -> Ints:
        """Return the indices of the largest rewards; ties go to the first."""
        return np.argsort(-rollouts.rewards_B[rows], kind="stable")[: self.settings.keep]
