"""The state of a replay: groups of rollouts, in order of arrival."""

from dataclasses import dataclass

import numpy as np
import polars as pl

from tasks.train.rollouts import Ints, Rollouts
from tasks.train.settings import BatchSettings


@dataclass
class State:
    """The stored rollouts, marked as replayed, without their texts and scores."""

    table: pl.DataFrame

    @property
    def rollouts(self) -> Rollouts:
        """The stored rollouts."""
        return Rollouts.of(self.table)


def state_of(rollouts: Rollouts) -> State:
    """Return a state with the non-empty groups of `rollouts`."""
    return State(to_table(rollouts.groups(np.unique(rollouts.group_B))))


def to_table(rollouts: Rollouts) -> pl.DataFrame:
    """Return the table of rollouts as a replay stores it."""
    return rollouts.with_columns(replayed=True, text="", scores="{}").table


def cost_Q(rollouts: Rollouts, batch: BatchSettings) -> Ints:
    """Return the size of each group in the batch's unit."""
    size_Q = rollouts.sizes_Q()
    return size_Q if batch.unit == "rollouts" else np.ones_like(size_Q)
