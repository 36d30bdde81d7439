"""`random`: random rollouts of each group, whatever their rewards, for comparison with `pods`."""

import numpy as np

from tasks.train.methods.select.keep import EXAMPLE, KeepInGroups, Settings
from tasks.train.rollouts import Ints, Rollouts

__all__ = ["EXAMPLE", "Method", "Settings"]


class Method(KeepInGroups):
    def choose(self, rollouts: Rollouts, rows: Ints, rng: np.random.Generator) -> Ints:
        return rng.permutation(len(rows))[: self.settings.keep]
