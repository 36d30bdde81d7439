"""The plan that `allocate` made, as columns: which prompts are visited, in which order, in groups
of which size. It never changes; how far a run has come is in its control's state.

Legend: V visits, in the order of training.
"""

import logging
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import polars as pl

from tasks.common.files import ArtifactError
from tasks.train.rollouts import GroupRequest, Ints
from tasks.train.settings import BatchSettings

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Plan:
    """Visits: the prompt's row, the group's size, phase and pass; and how many fit a step. With
    `keeps` no group counts for more rollouts of a batch than so many."""

    prompt_rows_V: Ints
    group_sizes_V: Ints
    phases_V: Ints
    passes_V: Ints
    batch: BatchSettings
    keeps: int | None = None

    def __len__(self) -> int:
        return len(self.prompt_rows_V)

    @property
    def num_prompts(self) -> int:
        """The number of prompts that a table by row needs room for."""
        return int(self.prompt_rows_V.max(initial=-1)) + 1

    def num_rollouts(self) -> int:
        """The rollouts of all visits."""
        return int(self.group_sizes_V.sum())

    def rest_of_phase(self, first: int) -> Ints:
        """The visits from `first` to the end of its phase."""
        end = int(self._phase_ends[np.searchsorted(self._phase_ends, first, side="right")])
        return np.arange(first, end)

    def cost(self, sizes: Ints) -> Ints:
        """What groups of `sizes` count for, in the batch's unit."""
        if self.batch.unit == "prompts":
            return np.ones_like(sizes)
        return sizes if self.keeps is None else np.minimum(sizes, self.keeps)

    def num_visits(self, sizes: Ints, room: int, *, is_last: bool = True) -> int:
        """How many groups of `sizes` fit into `room` (in the batch's unit), at least one.

        Where `sizes` go to the end of their phase and less than half of `room` would remain, that
        is taken in as well: a step on four rollouts moves the policy as far as one on many.
        """
        cost = np.cumsum(self.cost(sizes))
        num = max(int(np.searchsorted(cost, room, side="right")), 1)
        return len(sizes) if is_last and cost[-1] - cost[num - 1] < room / 2 else num

    def request(self, visits: Ints, counts: Ints) -> GroupRequest:
        """The request for `visits`, all of one phase, with `counts` rollouts each."""
        first = int(visits[0])
        return GroupRequest(
            self.prompt_rows_V[visits],
            np.asarray(counts, dtype=np.int64),
            int(self.passes_V[first]),
            int(self.phases_V[first]),
        )

    def share_before(self, position: int) -> float:
        """The share of the plan's rollouts that the visits before `position` have."""
        return float(self._rollouts_before[position] / self._rollouts_before[-1])

    @cached_property
    def _phase_ends(self) -> Ints:
        changes = np.flatnonzero(np.diff(self.phases_V)) + 1
        return np.append(changes, len(self))

    @cached_property
    def _rollouts_before(self) -> Ints:
        return np.concatenate([[0], np.cumsum(self.group_sizes_V)])


def read_plan(table: pl.DataFrame, prompt_ids: list[str], batch: BatchSettings) -> Plan:
    """A PLAN table as columns, prompts by their row in `prompt_ids`.

    Raises ArtifactError naming a prompt that is not among them.
    """
    row_of = {prompt_id: row for row, prompt_id in enumerate(prompt_ids)}
    if unknown := set(table["prompt_id"]) - set(row_of):
        raise ArtifactError(
            f"the plan visits prompt {min(unknown)}, which is not among the training prompts: "
            "run allocate again"
        )
    if alone := int((table["group_size"] == 1).sum()):
        logger.warning(
            "%d of %d visits have a group of one: its advantage is 0, it teaches nothing",
            alone,
            len(table),
        )
    sizes, phases, passes = (
        table[name].to_numpy().astype(np.int64) for name in ("group_size", "phase", "pass")
    )
    rows = np.array([row_of[prompt_id] for prompt_id in table["prompt_id"]], dtype=np.int64)
    return Plan(rows, sizes, phases, passes, batch)
