"""Shared code of the selectors that keep a fixed number of rollouts per group."""

import numpy as np

from tasks.common.params import at_least, settings
from tasks.train.data.columns import Bools, Ints
from tasks.train.data.rollouts import Rollouts
from tasks.train.slots import Select


@settings
class Settings:
    keep: int  # rollouts kept per group; a smaller group is kept whole

    def __post_init__(self) -> None:
        at_least(1, train__select__keep=self.keep)


EXAMPLE = Settings(keep=2)


class KeepInGroups(Select):
    """A selector that keeps `keep` rollouts of each group, and a smaller group whole."""

    settings: Settings

    def __call__(self, rollouts: Rollouts, rng: np.random.Generator) -> Bools:
        kept_B = np.ones(len(rollouts.group_B), dtype=np.bool_)
        for group in np.unique(rollouts.group_B):
            rows = np.flatnonzero(rollouts.group_B == group)
            if len(rows) > self.settings.keep:
                kept_B[rows] = False
                kept_B[rows[self.choose(rollouts, rows, rng)]] = True
        return kept_B

    def choose(self, rollouts: Rollouts, rows: Ints, rng: np.random.Generator) -> Ints:
        """Return the indices of the kept rollouts among the `rows` of a group."""
        raise NotImplementedError
