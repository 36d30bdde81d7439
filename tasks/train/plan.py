"""The plan that `allocate` made, as columns: which prompts are visited, in which order, in groups
of which size. It never changes; how far a run has come is in its control's state.

Legend: V visits, in the order of training.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import polars as pl

from tasks.common.files import ArtifactError
from tasks.train.rollouts import GroupRequest, Ints
from tasks.train.settings import BatchSettings


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

    def start(self, position: int, done: float | None) -> int | None:
        """The visit to go on from after those before `position`; None at the end of the plan. Where
        a share `done` of a budget is spent, it lies in the phase that this share of the plan falls
        in, whose visits are taken over again when all were taken; a budget has no other end."""
        if done is None:
            return position if position < len(self) else None
        shares = self._rollouts_before[self._phase_ends] / self._rollouts_before[-1]
        phase = min(int(np.searchsorted(shares, done, side="right")), len(shares) - 1)
        first, end = int(self._phase_ends[phase - 1]) if phase else 0, int(self._phase_ends[phase])
        return position if first <= position < end else first

    def rest_of_phase(self, first: int, most: int) -> Ints:
        """The visits from `first` to the end of its phase, but at most `most` of them: a phase may
        have ten million."""
        end = int(self._phase_ends[np.searchsorted(self._phase_ends, first, side="right")])
        return np.arange(first, min(end, first + most))

    def window(self, first: int, room: int) -> Ints:
        """The visits from `first` on among which those of the next `room` are, whatever their
        sizes: enough for `num_visits` to see whether half a batch is left of the phase."""
        return self.rest_of_phase(first, room + room // 2 + 1)

    def fit(self, sizes: Ints, room: int) -> int:
        """How many groups of `sizes` fit into `room` (in the batch's unit), at least one."""
        return max(int(np.searchsorted(np.cumsum(self.cost(sizes)), room, side="right")), 1)

    def num_visits(self, sizes: Ints, room: int) -> int:
        """The same of a window of visits; where less than half of `room` is left of the phase, that
        is taken in as well. A step on four rollouts moves the policy as far as one on many."""
        num = self.fit(sizes, room)
        return len(sizes) if self.cost(sizes[num:]).sum() < room / 2 else num

    def cost(self, sizes: Ints) -> Ints:
        """What groups of `sizes` count for, in the batch's unit."""
        if self.batch.unit == "prompts":
            return np.ones_like(sizes)
        return sizes if self.keeps is None else np.minimum(sizes, self.keeps)

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


def read_plan(table: pl.DataFrame, prompt_ids: pl.Series, batch: BatchSettings) -> Plan:
    """A PLAN table as columns, prompts by their row in `prompt_ids`.

    Raises ArtifactError naming a prompt that is not among them.
    """
    row_of = pl.DataFrame({"prompt_id": prompt_ids}).with_row_index("row")
    visits = table.select("prompt_id").join(
        row_of, on="prompt_id", how="left", maintain_order="left"
    )
    unknown = visits.filter(pl.col("row").is_null())["prompt_id"].sort()
    if len(unknown):
        raise ArtifactError(
            f"the plan visits prompt {unknown[0]}, which is not among the training prompts: run "
            "allocate again"
        )
    sizes, phases, passes = (
        table[name].to_numpy().astype(np.int64) for name in ("group_size", "phase", "pass")
    )
    rows = visits["row"].to_numpy().astype(np.int64)
    return Plan(rows, sizes, phases, passes, batch)
