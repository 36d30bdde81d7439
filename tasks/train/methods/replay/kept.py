"""The state of a replay: groups of rollouts, in order of arrival."""

from dataclasses import dataclass

import numpy as np
import polars as pl

from tasks.train.data.columns import Ints
from tasks.train.data.rollouts import Rollouts
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


def drawn(
    rollouts: Rollouts, rng: np.random.Generator, room: int, batch: BatchSettings
) -> Rollouts | None:
    """Return groups drawn uniformly, one or more, up to `room` (batch's unit); None if it is 0."""
    if room == 0:
        return None
    order = rng.permutation(len(rollouts.prompt_rows_Q))
    cost = cost_Q(rollouts, batch)[order]
    num = max(int(np.searchsorted(np.cumsum(cost), room, side="right")), 1)
    return rollouts.groups(np.sort(order[:num]))


def cost_Q(rollouts: Rollouts, batch: BatchSettings) -> Ints:
    """Return the size of each group in the batch's unit."""
    size_Q = rollouts.sizes_Q()
    return size_Q if batch.unit == "rollouts" else np.ones_like(size_Q)
