"""A queue of several steps: with `train.max_staleness` or `train.over_provision`, groups of later
steps are in flight during a step.

- `max_staleness` above 0: the batches of the next n steps are sampled during the updates on the n
  batches before them (`TrainSettings.num_ahead`; AReaL, arXiv 2505.24298; periodic asynchrony,
  arXiv 2511.18871);
- `over_provision` above 1: groups of the next step are in flight along with those of the current
  one, until as many are complete as the step requested, and none would exceed `max_staleness` in
  the next step. The others continue later, from their partial tokens (APRIL, arXiv 2509.18521). No
  group is lost and none remains at the end. Short completions end first, so early batches are
  easier and late ones longer.

The policy that samples a batch depends on the steps and not on the clock, unless weights are
replaced in the middle of completions (`train.in_flight_updates`). The importance weights of the
loss correct for older policies."""

import math
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import polars as pl

from tasks.train.data.columns import UNFINISHED, with_values
from tasks.train.data.rollouts import Rollouts, merge
from tasks.train.loop.queue import Batch, GroupQueue
from tasks.train.loop.state import TrainingError
from tasks.train.sampling.collector import Cost


class AheadQueue(GroupQueue):
    """A queue with groups of several steps. One thread may fill it while another takes batches or
    saves, so both change shared state only under `lock`, and sampling uses copies of the groups.
    `reserved` are the amounts that the replay adds to the batches that are requested next."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.sampled_seconds = 0.0
        self.reserved = deque[int]()
        self.lock = threading.Condition()

    @property
    def num_early(self) -> int:
        """The number of batches requested one step early: 1 with over-provisioning, else 0."""
        return int(self.settings.over_provision > 1.0)

    @property
    def seconds(self) -> float:
        with self.lock:
            now = time.perf_counter() - self.began if self.began else 0.0
            return self.sampled_seconds + now

    def reserve(self, num_steps: int, taken: Sequence[Batch] = ()) -> None:
        """Fix the amount that the replay adds to the batches of the first `num_steps` steps, before
        they are sampled. The `taken` batches will draw from the replay first."""
        with self.lock:
            promised = sum(batch.num_replayed for batch in [*taken, *self.batches])
            promised += sum(self.reserved)
            while self.num_requested + len(self.reserved) < num_steps + self.num_early:
                self.reserved.append(int(self.slots.replay.room(self.settings.batch, promised)))
                promised += self.reserved[-1]

    def num_replayed(self) -> int:
        return self.reserved[0]

    def request(self) -> bool:
        is_requested = super().request()
        if is_requested:
            self.reserved.popleft()
        return is_requested

    def begin(self) -> Batch | None:
        with self.lock:
            self.began = time.perf_counter()
            if self.settings.in_flight_updates:  # control must not depend on the clock
                self.observe(self.num_sampled - self.settings.lead)
            self.reserve(self.num_sampled + 1)
            while len(self.batches) <= self.num_complete + self.num_early and self.request():
                pass
            if len(self.batches) > self.num_complete:
                return self.batches[self.num_complete]
            self.began = 0.0
            return None

    def sample(self, batch: Batch, version: int) -> tuple[pl.DataFrame, Cost]:
        table, until = self.in_flight(batch), None
        if self.num_early:
            until = len(batch.fresh.prompt_rows_Q), batch.step - self.settings.max_carried
        return self.collector.collect(self.prompts, table, version, until)

    def later(self) -> list[Batch]:
        """Return the batches after the one in flight."""
        return self.batches[self.num_complete + 1 :]

    def in_flight(self, batch: Batch) -> pl.DataFrame:
        """Return the requested groups of a batch, followed by the groups of the next batch that are
        sampled along with them: at most all of the next batch, and none if the next batch is in
        another phase of the plan."""
        table = batch.fresh.table.filter(pl.col("group").is_in(batch.requested))
        with self.lock:
            later = self.later()
        if not later or later[0].phase != batch.phase:
            return table
        first = len(batch.fresh.prompt_rows_Q)
        num = math.ceil((self.settings.over_provision - 1.0) * first)
        beside = later[0].fresh.table.filter(pl.col("group") < num)
        return pl.concat([table, beside.with_columns(pl.col("group") + first)])

    def receive(self, batch: Batch, table: pl.DataFrame, cost: Cost) -> None:
        with self.lock:
            num = self.num_complete
            super().receive(batch, table, cost)
            if self.num_complete > num:
                self.sampled_seconds, self.began = self.sampled_seconds + batch.seconds, 0.0

    def put_back(self, batch: Batch, table: pl.DataFrame) -> None:
        """Replace the requested groups with the sampled ones. With over-provisioning the batch gets
        the first complete groups, and the others move to the next batch."""
        since_B, later = table["since"].to_numpy(), self.later()
        table = with_values(table, {"since": np.where(since_B < 0, batch.step, since_B)})
        if not self.num_early:
            super().put_back(batch, table)
            return
        num = len(batch.fresh.prompt_rows_Q)
        groups = Rollouts.of(table)
        is_going_Q = np.bincount(groups.group_B, table["reason"] == UNFINISHED) > 0
        complete = np.flatnonzero(~is_going_Q)[:num]
        if len(complete) != num:
            raise TrainingError(
                f"step {batch.step}: sampling ended with {len(complete)} complete groups, but "
                f"control requested {num}"
            )
        batch.fresh = groups.groups(complete)
        if later:
            left = groups.groups(np.setdiff1d(np.arange(len(is_going_Q)), complete))
            behind = later[0].fresh
            kept = np.arange(len(left.prompt_rows_Q), len(behind.prompt_rows_Q))
            later[0].fresh = merge([left, behind.groups(kept)])

    def take(self, num: int = 1, until: float | None = None) -> list[Batch]:
        with self.lock:
            return super().take(num, until)

    def oldest_version(self, version: int, steps: Sequence[Mapping[str, Any]]) -> int:
        """Return the policy of `max_staleness` steps ago."""
        newest = steps[-self.settings.max_staleness :]
        return version - int(sum(row["num_updates"] for row in newest))

    def describe(self) -> dict[str, float]:
        """Return the control's values, and the number of groups carried to the next step."""
        with self.lock:
            values = super().describe()
            waiting = [batch.fresh.table for batch in self.batches[self.num_complete :]]
        if self.num_early:
            begun = [table.filter(pl.col("since") >= 0) for table in waiting]
            values["carried_groups"] = float(sum(table["group"].n_unique() for table in begun))
        return values

    def snapshot(self) -> tuple[dict[str, Any], dict[str, Any], pl.DataFrame]:
        with self.lock:
            return super().snapshot()

    def numbers(self) -> dict[str, Any]:
        return {**super().numbers(), "reserved": [*self.reserved]}

    def restore(self, numbers: Mapping[str, Any], table: pl.DataFrame) -> None:
        super().restore(numbers, table)
        self.reserved = deque(numbers["reserved"])


def ages(version: int, batch: Batch) -> dict[str, float]:
    """Return the maximum and mean age of a batch's fresh tokens: the number of updates between a
    token's version and `version`."""
    age = version - batch.fresh.versions_N()
    if not len(age):
        return {}
    return {"staleness": float(age.max()), "staleness_mean": float(age.mean())}
