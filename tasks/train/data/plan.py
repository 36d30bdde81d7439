"""The plan of `allocate`, as columns: the visited prompts, their order and their group sizes. It
never changes; the progress of a run is in its control's state.

Legend: V visits, in the order of training.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import polars as pl

from tasks.train.data.columns import Ints
from tasks.train.data.prompts import GroupRequest, rows_of
from tasks.train.settings import BatchSettings


@dataclass(frozen=True)
class Plan:
    """The visits in order, each with its prompt row, group size, phase and pass; and the size of a
    step's `batch`. With `keeps` a group counts for at most `keeps` rollouts of a batch."""

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
        """The number of prompt rows: the largest row plus one."""
        return int(self.prompt_rows_V.max(initial=-1)) + 1

    def num_rollouts(self) -> int:
        return int(self.group_sizes_V.sum())

    def start(self, position: int, done: float | None) -> int | None:
        """Return the next visit: `position`, or None after the plan's last. With a budget, of which
        a share `done` is spent, the phase at that share of the plan's rollouts is due. If it does
        not contain `position`, return its first visit. So a phase repeats until another is due."""
        if done is None:
            return position if position < len(self) else None
        shares = self._rollouts_before[self._phase_ends] / self._rollouts_before[-1]
        phase = min(int(np.searchsorted(shares, done, side="right")), len(shares) - 1)
        first, end = int(self._phase_ends[phase - 1]) if phase else 0, int(self._phase_ends[phase])
        return position if first <= position < end else first

    def rest_of_phase(self, first: int, most: int) -> Ints:
        """Return the visits from `first` to the end of its phase, but at most `most` of them: a
        phase may have ten million."""
        end = int(self._phase_ends[np.searchsorted(self._phase_ends, first, side="right")])
        return np.arange(first, min(end, first + most))

    def window(self, first: int, room: int) -> Ints:
        """Return the visits of a phase from `first` on: enough to fill `room` with groups of any
        size, and for `num_visits` to check whether those left over fill half of `room` or more."""
        return self.rest_of_phase(first, room + room // 2 + 1)

    def fit(self, sizes: Ints, room: int) -> int:
        """Return how many of the first groups fit in `room` (in the batch's unit); at least one."""
        return max(int(np.searchsorted(np.cumsum(self.cost(sizes)), room, side="right")), 1)

    def num_visits(self, sizes: Ints, room: int) -> int:
        """Return how many visits of a window the next step takes: `fit`, or all if the rest fill
        less than half of `room`. A step on few rollouts moves the policy as far as a full one."""
        num = self.fit(sizes, room)
        return len(sizes) if self.cost(sizes[num:]).sum() < room / 2 else num

    def cost(self, sizes: Ints) -> Ints:
        """Return each group's size in the batch's unit; `sizes` are in rollouts."""
        if self.batch.unit == "prompts":
            return np.ones_like(sizes)
        return sizes if self.keeps is None else np.minimum(sizes, self.keeps)

    def request(self, visits: Ints, counts: Ints) -> GroupRequest:
        """Return the request for `visits`, all of one phase, with `counts` rollouts each."""
        first = int(visits[0])
        return GroupRequest(
            self.prompt_rows_V[visits],
            np.asarray(counts, dtype=np.int64),
            int(self.passes_V[first]),
            int(self.phases_V[first]),
        )

    def share_before(self, position: int) -> float:
        """Return the share of the plan's rollouts in the visits before `position`."""
        return float(self._rollouts_before[position] / self._rollouts_before[-1])

    @cached_property
    def _phase_ends(self) -> Ints:
        changes = np.flatnonzero(np.diff(self.phases_V)) + 1
        return np.append(changes, len(self))

    @cached_property
    def _rollouts_before(self) -> Ints:
        return np.concatenate([[0], np.cumsum(self.group_sizes_V)])


def read_plan(table: pl.DataFrame, prompt_ids: pl.Series, batch: BatchSettings) -> Plan:
    """Return the plan in a PLAN table, with each prompt as its row in `prompt_ids`. Raise
    ArtifactError, with the prompt's id, if the plan visits any other prompt."""
    rows = rows_of(table["prompt_id"], prompt_ids, "the plan visits")
    sizes, phases, passes = (
        table[name].to_numpy().astype(np.int64) for name in ("group_size", "phase", "pass")
    )
    return Plan(rows, sizes, phases, passes, batch)
