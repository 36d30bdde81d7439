"""Some rollouts of every group, chosen group by group."""

from collections.abc import Callable

import numpy as np

from tasks.common.params import at_least
from tasks.train.rollouts import Bools, Ints


def keep_in_groups(group_B: Ints, keep: int, choose: Callable[[Ints], Ints]) -> Bools:
    """[B] whether a rollout is kept: `choose(rows)` names the `keep` places of a group's rows;
    where a group has no more than `keep`, all are."""
    at_least(1, train__select__keep=keep)
    kept_B = np.ones(len(group_B), dtype=np.bool_)
    for group in np.unique(group_B):
        rows = np.flatnonzero(group_B == group)
        if len(rows) > keep:
            kept_B[rows] = False
            kept_B[rows[choose(rows)]] = True
    return kept_B
