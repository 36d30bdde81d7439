"""The groups that the control requested and no step has taken: waiting, in flight, or complete.

    control requests -> Batch of groups -> sampled and graded -> complete -> taken by a step

`train.max_staleness` and `train.over_provision` set how many groups exist at once:

- 0 and 1.0: a step requests, samples and takes its own batch;
- `max_staleness` above 0: the batches of the next n steps are sampled, all from one policy, during
  the updates on the n batches before them (`TrainSettings.num_ahead`; AReaL, arXiv 2505.24298;
  periodic asynchrony, arXiv 2511.18871);
- `over_provision` above 1: groups of the next step are in flight along with those of the current
  step. Sampling ends when as many groups as the step requested are complete. The others continue
  later, from their partial tokens (APRIL, arXiv 2509.18521). Sampling also waits for groups that
  would exceed `max_staleness` in the next step. Each step takes as many groups as its own request
  had, in the order of the requests, so no group is lost and none remains at the end.

The policy that samples a batch depends on the steps and not on the clock, unless weights are
replaced in the middle of completions (`train.in_flight_updates`). Short completions end first, so
with `over_provision`, early batches are easier and late ones longer. The importance weights of the
loss correct for older policies."""

import math
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import numpy as np
import polars as pl

from tasks.train.data.columns import COLUMNS, UNFINISHED, with_values
from tasks.train.data.prompts import GroupRequest, Prompts
from tasks.train.data.rollouts import Rollouts, make_rollouts, merge
from tasks.train.loop.budget import RunBudget
from tasks.train.loop.state import ROUNDING, TrainingError
from tasks.train.sampling.collector import Collector, Cost
from tasks.train.settings import TrainSettings
from tasks.train.slots import Slots, SoFar

SAMPLING_STREAM, LEARNING_STREAM, CONTROL_STREAM = 0, 1, 2  # of a step's random numbers
APART = ("choices", "seeds", "is_kept", "fresh")  # fields of a batch that are not plain numbers
NONE = make_rollouts(np.zeros(0, np.int64), [], np.zeros(0, np.int64))


def random_numbers(seed: int, step: int, stream: int) -> np.random.Generator:
    """Return the generator of a step's random numbers for one purpose (`stream`). They depend on
    nothing else, so a resumed run repeats the interrupted part."""
    return np.random.default_rng([seed, step, stream])


def cut(request: GroupRequest, most: int, settings: TrainSettings) -> GroupRequest:
    """Return the request cut, near the end of a budget, to the first rollouts that `most` needs, in
    the batch's unit. Return it whole if the batch counts prompts."""
    if settings.batch.unit == "prompts":
        return request
    limit = settings.select["keep"] if settings.batch.counts == "kept" else request.counts
    sizes = np.minimum(request.counts, limit)
    before = np.cumsum(sizes) - sizes
    counts = request.counts * np.clip(most - before, 0, sizes) // sizes
    kept = counts > 0
    joined = None if request.joined is None else request.joined[kept]
    return replace(
        request, prompt_rows=request.prompt_rows[kept], counts=counts[kept], joined=joined
    )


@dataclass
class Batch:
    """The groups of a step, and the amount that the replay adds to them (in the batch's unit).

    `progress` is the share of the run that is done after this step; with a budget it is predicted
    until the step's update. `target` is the target amount of the control's requests, in the batch's
    unit. `cost` and `seconds` include sampling and judging.

    `choices` and `seeds` generate the step's random numbers for the control and for completions.
    `asked` are the indices of the groups that the control requested last, until they are sampled;
    `joined` are those of the groups that a stored rollout joins. Example: Batch(step=7, replayed=0,
    phase=1, progress=0.4, fresh=Rollouts(...), cost=Cost(2.1e9, 913, 8), seconds=1.3, ...)."""

    step: int
    replayed: int
    choices: np.random.Generator = field(repr=False, compare=False)
    seeds: np.random.Generator = field(repr=False, compare=False)
    num_requests: int = 0
    pass_number: int = 0
    phase: int = 0
    progress: float = 0.0
    target: int = 0
    cost: Cost = field(default_factory=Cost)
    seconds: float = 0.0
    asked: list[int] = field(default_factory=list)
    joined: list[int] = field(default_factory=list)
    is_kept: bool = field(default=False, compare=False)  # complete, in a checkpoint
    fresh: Rollouts = field(default=NONE, repr=False, compare=False)  # its groups


class RolloutBuffer:
    """The requested batches that no step has taken, in the order of their steps. The first
    `num_complete` of them are complete; `unobserved` are the taken batches that the control has yet
    to observe. With a `budget`, the trainer's, the run ends when the budget is spent, not with the
    plan. One thread may fill the buffer while another takes batches or saves, so both change shared
    state only under `lock`, and sampling uses copies of the groups."""

    def __init__(
        self,
        settings: TrainSettings,
        seed: int,
        slots: Slots,
        collector: Collector,
        prompts: Prompts,
        budget: RunBudget | None = None,
    ) -> None:
        self.settings, self.seed, self.slots = settings, seed, slots
        self.collector, self.prompts, self.budget = collector, prompts, budget
        self.batches: list[Batch] = []
        self.unobserved: list[Batch] = []
        self.num_complete = self.num_asked = 0
        self.sampled_seconds = 0.0
        self.began: float | None = None  # start time of the batch in flight
        self.replayed = deque[int]()  # of the batches that are requested next
        self.lock = threading.Condition()

    @property
    def num_early(self) -> int:
        """The number of batches requested one step early: 1 with over-provisioning, else 0."""
        return int(self.settings.over_provision > 1.0)

    @property
    def num_sampled(self) -> int:
        """The number of steps with complete batches, since the start of the run."""
        return self.num_asked - (len(self.batches) - self.num_complete)

    @property
    def seconds(self) -> float:
        with self.lock:
            now = time.perf_counter() - self.began if self.began else 0.0
            return self.sampled_seconds + now

    def reserve(self, num_steps: int, taken: Sequence[Batch] = ()) -> None:
        """Fix the amount that the replay adds to the batches of the first `num_steps` steps, before
        they are sampled. The `taken` batches will draw from the replay first."""
        with self.lock:
            promised = sum(batch.replayed for batch in [*taken, *self.batches])
            promised += sum(self.replayed)
            while self.num_asked + len(self.replayed) < num_steps + self.num_early:
                self.replayed.append(int(self.slots.replay.room(self.settings.batch, promised)))
                promised += self.replayed[-1]

    def fill(self, version: int) -> bool:
        """Complete one more batch, with the policy after `version` updates; return False at the end
        of the run. This changes no state that an update changes."""
        with self.lock:
            self.began = time.perf_counter()
            if self.settings.in_flight_updates:  # control must not depend on the clock
                self.observe(self.num_sampled - self.settings.lead)
            while len(self.batches) <= self.num_complete + self.num_early and self.ask():
                pass
            if len(self.batches) == self.num_complete:
                self.began = None
                return False
            batch, *later = self.batches[self.num_complete :]
        self.complete(batch, later, version)
        return True

    def take(self, num: int, until: float | None = None) -> list[Batch]:
        """Return the next complete batches, at most `num`, and none after the batch that completes
        the share `until` of the run; an empty list at the end of the run."""
        with self.lock:
            taken = self.batches[: min(num, self.num_complete)]
            if until is not None:
                done = [batch.progress >= until - ROUNDING for batch in taken]
                taken = taken[: done.index(True) + 1] if any(done) else taken
            del self.batches[: len(taken)]
            self.num_complete -= len(taken)
            self.unobserved += taken
            return taken

    def observe(self, num_steps: int) -> None:
        """Let the slots `control` and `generate`, and the budget, observe the batches of the first
        `num_steps` steps. No request may run at the same time."""
        while self.unobserved and self.unobserved[0].step < num_steps:
            batch = self.unobserved.pop(0)
            self.slots.control.observe(batch.fresh)
            self.slots.generate.observe(batch.fresh)
            if self.budget is not None:
                self.budget.observe_step()

    def ask(self) -> bool:
        """Request the next step's groups from the control; return False at the end of the run."""
        step, limit = self.num_asked, self.settings.max_steps
        is_over = self.budget is not None and self.budget.is_over(self.num_ahead)
        if is_over or (limit is not None and step >= limit):
            return False
        choices = random_numbers(self.seed, step, CONTROL_STREAM)
        seeds = random_numbers(self.seed, step, SAMPLING_STREAM)
        batch = Batch(step, self.replayed[0], choices, seeds)
        if not self.ask_for_more(batch):
            return False
        self.replayed.popleft()
        self.batches.append(batch)
        self.num_asked += 1
        return True

    def ask_for_more(self, batch: Batch) -> bool:
        """Request groups of a batch from the control, which gets the batch's rollouts so far;
        return False if it requests no more."""
        control, budget, ahead = self.slots.control, self.budget, self.num_ahead
        rollouts = batch.fresh if batch.num_requests else None
        so_far = SoFar(rollouts, batch.num_requests, batch.replayed)
        if budget is not None:
            batch.target = batch.target or budget.most(ahead)
            so_far = replace(so_far, done=budget.done(ahead), most=batch.target)
        request = control.next(so_far, batch.choices)
        if request is None:
            return False
        if not batch.num_requests:
            batch.pass_number, batch.phase = int(request.pass_number), int(request.phase)
        batch.num_requests += 1
        batch.progress = float(control.progress())
        if budget is not None:
            batch.progress = budget.progress(ahead + 1)
            if batch.num_requests == 1 and batch.target < budget.size:
                request = cut(request, batch.target, self.settings)
        self.add_groups(batch, request)
        return True

    @property
    def num_ahead(self) -> int:
        """The number of batches that the control has yet to observe."""
        return len(self.unobserved) + len(self.batches)

    def add_groups(self, batch: Batch, request: GroupRequest) -> None:
        """Add the groups of a request to a batch. Raise ValueError if the request extends a group
        of another prompt."""
        token_ids = self.prompts.token_ids(request.prompt_rows)
        before = batch.fresh.prompt_rows_Q
        numbers_Q = request.groups(len(before))
        rows_Q = np.concatenate([before, request.prompt_rows[numbers_Q >= len(before)]])
        if (rows_Q[numbers_Q] != request.prompt_rows).any():
            raise ValueError("a request extends a group of another prompt")
        owner_B = np.repeat(np.arange(len(numbers_Q)), request.counts)
        seeds = batch.seeds.integers(0, 2**63 - 1, size=len(owner_B))
        new = make_rollouts(request.prompt_rows, token_ids, owner_B, seed=seeds)
        new = new.with_columns(group=numbers_Q[owner_B])
        table = pl.concat([batch.fresh.table, new.table]).sort("group", maintain_order=True)
        batch.fresh = Rollouts(table, rows_Q)
        batch.asked = [*dict.fromkeys(numbers_Q.tolist())]
        if request.joined is not None:
            batch.joined += numbers_Q[request.joined].tolist()

    def complete(self, batch: Batch, later: Sequence[Batch], version: int) -> None:
        """Sample and grade the groups of a batch until the control requests no more of them."""
        while batch.asked:
            table, until = self.in_flight(batch, later), None
            if self.num_early:
                until = len(batch.fresh.prompt_rows_Q), batch.step - self.settings.max_carried
            table, cost = self.collector.collect(self.prompts, table, version, until)
            with self.lock:
                self.put_back(batch, later, table)
                batch.cost += cost
                batch.asked = []
                if not self.ask_for_more(batch):
                    self.count_complete(batch)

    def count_complete(self, batch: Batch) -> None:
        """Count a batch as complete, after the control's last request for it."""
        assert self.began is not None
        batch.seconds = time.perf_counter() - self.began
        self.sampled_seconds, self.began = self.sampled_seconds + batch.seconds, None
        self.num_complete += 1

    def in_flight(self, batch: Batch, later: Sequence[Batch]) -> pl.DataFrame:
        """Return the requested groups of a batch, followed by the groups of the next batch that are
        sampled along with them: at most all of the next batch, and none if the next batch is in
        another phase of the plan."""
        table = batch.fresh.table.filter(pl.col("group").is_in(batch.asked))
        if not later or later[0].phase != batch.phase:
            return table
        first = len(batch.fresh.prompt_rows_Q)
        num = math.ceil((self.settings.over_provision - 1.0) * first)
        beside = later[0].fresh.table.filter(pl.col("group") < num)
        return pl.concat([table, beside.with_columns(pl.col("group") + first)])

    def put_back(self, batch: Batch, later: Sequence[Batch], table: pl.DataFrame) -> None:
        """Replace the requested groups with the sampled ones. With over-provisioning the batch gets
        the first complete groups, and the others move to the next batch."""
        since_B = table["since"].to_numpy()
        table = with_values(table, {"since": np.where(since_B < 0, batch.step, since_B)})
        if not self.num_early:
            others = batch.fresh.table.filter(~pl.col("group").is_in(batch.asked))
            table = pl.concat([others, table]).sort("group", maintain_order=True)
            batch.fresh = replace(batch.fresh, table=table)
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

    def table(self) -> pl.DataFrame:
        """Return the rollouts of all batches, for a checkpoint. Mark complete batches as kept: from
        then on a kill does not lose them."""
        for batch in self.batches[: self.num_complete]:
            batch.is_kept = True
        every = [each.fresh.table for each in [*self.unobserved, *self.batches]]
        numbered = [table.with_columns(batch=pl.lit(number)) for number, table in enumerate(every)]
        return pl.concat([NONE.table.with_columns(batch=pl.lit(0)), *numbered])

    def numbers(self) -> dict[str, Any]:
        """Return the state except for the rollouts, as JSON for a checkpoint."""
        return {
            "num_asked": self.num_asked,
            "num_complete": self.num_complete,
            "num_unobserved": len(self.unobserved),
            "replayed": [*self.replayed],
            "batches": [numbers_of(batch) for batch in [*self.unobserved, *self.batches]],
        }

    def restore(self, numbers: Mapping[str, Any], table: pl.DataFrame) -> None:
        """Restore the state of the buffer from a checkpoint."""
        self.num_asked = numbers["num_asked"]
        self.num_complete, num = numbers["num_complete"], numbers["num_unobserved"]
        self.replayed = deque(numbers["replayed"])
        found = [
            batch_of(values, Rollouts.of(table.filter(pl.col("batch") == place).select([*COLUMNS])))
            for place, values in enumerate(numbers["batches"])
        ]
        self.unobserved, self.batches = found[:num], found[num:]
        for batch in found[: num + self.num_complete]:
            batch.is_kept = True


def numbers_of(batch: Batch) -> dict[str, Any]:
    """Return a batch without its rollouts, as JSON for a checkpoint."""
    plain = [each.name for each in fields(batch) if each.name not in APART]
    return {
        **{name: getattr(batch, name) for name in plain},
        "cost": asdict(batch.cost),
        "choices": batch.choices.bit_generator.state,
        "seeds": batch.seeds.bit_generator.state,
    }


def batch_of(numbers: Mapping[str, Any], fresh: Rollouts) -> Batch:
    """Return the batch of these numbers and rollouts; the inverse of `numbers_of`."""
    choices, seeds = np.random.default_rng(), np.random.default_rng()
    choices.bit_generator.state, seeds.bit_generator.state = numbers["choices"], numbers["seeds"]
    made = {"cost": Cost(**numbers["cost"]), "choices": choices, "seeds": seeds, "fresh": fresh}
    return Batch(**{**numbers, **made})
