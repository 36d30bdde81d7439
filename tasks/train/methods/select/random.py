"""`random`: random rollouts of each group, independent of their rewards: the control for `pods`."""

import numpy as np

from tasks.train.methods.select.keep import EXAMPLE, Settings, keep_in_groups
from tasks.train.rollouts import Bools, Ints, Rollouts
from tasks.train.slots import Select

__all__ = ["EXAMPLE", "Method", "Settings"]


class Method(Select):
    def __init__(self, settings: Settings) -> None:
        self.keep = settings.keep

    def __call__(self, rollouts: Rollouts, rng: np.random.Generator) -> Bools:
        """Return [B] whether a rollout is one of `keep` of its group, drawn at random."""

        def any_of(rows: Ints) -> Ints:
            return rng.permutation(len(rows))[: self.keep]

        return keep_in_groups(rollouts.group_B, self.keep, any_of)
