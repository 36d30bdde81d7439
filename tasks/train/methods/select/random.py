"""`random`: random rollouts of each group, independent of their rewards: the control for `pods`."""

import numpy as np

from tasks.train.methods.select.keep import EXAMPLE, Settings, keep_in_groups
from tasks.train.rollouts import Bools, Ints, Rollouts
from tasks.train.slots import Select

__all__ = ["EXAMPLE", "Method", "Settings"]


class Method(Select):
    settings: Settings

    def __call__(self, rollouts: Rollouts, rng: np.random.Generator) -> Bools:
        """Return [B] whether a rollout is one of `keep` of its group, drawn at random."""

        def any_of(rows: Ints) -> Ints:
            return rng.permutation(len(rows))[: self.settings.keep]

        return keep_in_groups(rollouts.group_B, self.settings.keep, any_of)
