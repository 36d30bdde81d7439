"""`random`: random rollouts of each group, whatever their rewards, for comparison with `pods`."""

import numpy as np

from tasks.train.data.columns import Ints
from tasks.train.data.rollouts import Rollouts
from tasks.train.methods.select.keep import EXAMPLE, KeepInGroups, Settings

__all__ = ["EXAMPLE", "Method", "Settings"]


class Method(KeepInGroups):
    def choose(self, rollouts: Rollouts, rows: Ints, rng: np.random.Generator) -> Ints:
        return rng.permutation(len(rows))[: self.settings.keep]
