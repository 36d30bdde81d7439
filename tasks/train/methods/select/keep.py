"""Shared code of the selectors that keep a fixed number of rollouts per group."""

from collections.abc import Callable

import numpy as np

from tasks.common.params import at_least, settings
from tasks.train.rollouts import Bools, Ints


@settings
class Settings:
    """The number of rollouts kept per group; a smaller group is kept whole."""

    keep: int  # rollouts kept per group; a smaller group is kept whole

    def __post_init__(self) -> None:
        at_least(1, train__select__keep=self.keep)


EXAMPLE = Settings(keep=2)


def keep_in_groups(group_B: Ints, keep: int, choose: Callable[[Ints], Ints]) -> Bools:
    """Return [B] whether a rollout is kept. `choose(rows)` returns the `keep` places of a group's
    rows; a group of at most `keep` is kept whole."""
    kept_B = np.ones(len(group_B), dtype=np.bool_)
    for group in np.unique(group_B):
        rows = np.flatnonzero(group_B == group)
        if len(rows) > keep:
            kept_B[rows] = False
            kept_B[rows[choose(rows)]] = True
    return kept_B
