"""The queue of a step's groups, from the control's request to the step that takes them.

    control requests -> Batch of groups -> sampled and graded -> complete -> taken by a step

Here a step requests, samples and takes its own batch (`loop.ahead`: groups of later steps too)."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import numpy as np
import polars as pl

from tasks.train.data.columns import COLUMNS
from tasks.train.data.prompts import GroupRequest, Prompts
from tasks.train.data.rollouts import Rollouts, make_rollouts
from tasks.train.loop.budget import RunBudget
from tasks.train.loop.state import ROUNDING
from tasks.train.sampling.collector import Collector, Cost
from tasks.train.settings import TrainSettings
from tasks.train.slots import Slots, SoFar

SAMPLING_STREAM, LEARNING_STREAM, CONTROL_STREAM = 0, 1, 2  # of a step's random numbers
APART = ("choices", "seeds", "is_kept", "fresh")  # fields of a batch that are not plain numbers
NO_ROLLOUTS = make_rollouts(np.zeros(0, np.int64), [], np.zeros(0, np.int64))


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
    """The groups of a step; `num_replayed` (in the batch's unit) is what the replay adds to them.

    `progress` is the share of the run that is done after this step; with a budget it is predicted
    until the step is charged. `target` is the amount that the control's requests aim at, in the
    batch's unit. `cost` and `seconds` include sampling and judging.

    `choices` and `seeds` generate the step's random numbers for the control and for completions.
    `requested` are the indices of the groups that the control requested last, until they are
    sampled; `joined` are those of the groups that a stored rollout joins. Example: Batch(step=7,
    num_replayed=0, phase=1, progress=0.4, fresh=Rollouts(...), seconds=1.3, ...)."""

    step: int
    num_replayed: int
    choices: np.random.Generator = field(repr=False, compare=False)
    seeds: np.random.Generator = field(repr=False, compare=False)
    num_requests: int = 0
    pass_number: int = 0
    phase: int = 0
    progress: float = 0.0
    target: int = 0
    cost: Cost = field(default_factory=Cost)
    seconds: float = 0.0
    requested: list[int] = field(default_factory=list)
    joined: list[int] = field(default_factory=list)
    is_kept: bool = field(default=False, compare=False)  # complete, in a checkpoint
    fresh: Rollouts = field(default=NO_ROLLOUTS, repr=False, compare=False)  # its groups


class GroupQueue:
    """The requested batches that no step has taken, in the order of their steps. The first
    `num_complete` of them are complete; `unobserved` are the taken batches that the control has yet
    to observe. With a `budget` (the trainer's), the run ends when it is spent, not with the
    plan."""

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
        self.num_complete = self.num_requested = 0
        self.began = 0.0  # start time of the batch in flight

    @property
    def num_sampled(self) -> int:
        """The number of steps with complete batches, since the start of the run."""
        return self.num_requested - (len(self.batches) - self.num_complete)

    def num_replayed(self) -> int:
        """Return the amount that the replay adds to the next requested batch."""
        return int(self.slots.replay.room(self.settings.batch, 0))

    def fill(self, version: int) -> bool:
        """Complete one more batch, with the policy after `version` updates; return False at the end
        of the run. This changes no state that an update changes."""
        batch = self.begin()
        if batch is None:
            return False
        while batch.requested:
            self.receive(batch, *self.sample(batch, version))
        return True

    def begin(self) -> Batch | None:
        """Return the batch to complete next; None at the end of the run."""
        self.began = time.perf_counter()
        return self.batches[self.num_complete] if self.request() else None

    def sample(self, batch: Batch, version: int) -> tuple[pl.DataFrame, Cost]:
        """Sample and grade the requested groups of a batch; return them, and the cost."""
        table = batch.fresh.table.filter(pl.col("group").is_in(batch.requested))
        return self.collector.collect(self.prompts, table, version)

    def receive(self, batch: Batch, table: pl.DataFrame, cost: Cost) -> None:
        """Add the sampled groups to a batch, which is complete if the control requests no more."""
        self.put_back(batch, table)
        batch.cost += cost
        batch.requested = []
        if not self.request_more(batch):
            batch.seconds = time.perf_counter() - self.began
            self.num_complete += 1

    def put_back(self, batch: Batch, table: pl.DataFrame) -> None:
        """Replace the requested groups with the sampled ones."""
        others = batch.fresh.table.filter(~pl.col("group").is_in(batch.requested))
        table = pl.concat([others, table]).sort("group", maintain_order=True)
        batch.fresh = replace(batch.fresh, table=table)

    def take(self, num: int = 1, until: float | None = None) -> list[Batch]:
        """Return the next complete batches, at most `num`, and none after the batch that completes
        the share `until` of the run; an empty list at the end of the run."""
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
        `num_steps` steps."""
        while self.unobserved and self.unobserved[0].step < num_steps:
            batch = self.unobserved.pop(0)
            self.slots.control.observe(batch.fresh)
            self.slots.generate.observe(batch.fresh)
            if self.budget is not None:
                self.budget.observe_step()

    def oldest_version(self, version: int, steps: Sequence[Mapping[str, Any]]) -> int:
        """Return the oldest policy that may have sampled a token of the next step: the present
        one, after `version` updates. `steps` are the rows of the steps so far."""
        return version

    def describe(self) -> dict[str, float]:
        """Return the control's values for the record."""
        return {f"control/{name}": num for name, num in self.slots.control.describe().items()}

    def snapshot(self) -> tuple[dict[str, Any], dict[str, Any], pl.DataFrame]:
        """Return the states of the slots, and the numbers and the rollouts of the queue."""
        return self.slots.states(), self.numbers(), self.table()

    def request(self) -> bool:
        """Request the next step's groups from the control; return False at the end of the run."""
        step, limit = self.num_requested, self.settings.max_steps
        is_over = self.budget is not None and self.budget.is_over(self.num_ahead)
        if is_over or (limit is not None and step >= limit):
            return False
        choices = random_numbers(self.seed, step, CONTROL_STREAM)
        seeds = random_numbers(self.seed, step, SAMPLING_STREAM)
        batch = Batch(step, self.num_replayed(), choices, seeds)
        if not self.request_more(batch):
            return False
        self.batches.append(batch)
        self.num_requested += 1
        return True

    def request_more(self, batch: Batch) -> bool:
        """Request groups of a batch from the control, which gets the batch's rollouts so far;
        return False if it requests no more."""
        control, budget, ahead = self.slots.control, self.budget, self.num_ahead
        rollouts = batch.fresh if batch.num_requests else None
        so_far = SoFar(rollouts, batch.num_requests, batch.num_replayed)
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
        batch.requested = [*dict.fromkeys(numbers_Q.tolist())]
        if request.joined is not None:
            batch.joined += numbers_Q[request.joined].tolist()

    def table(self) -> pl.DataFrame:
        """Return the rollouts of all batches, for a checkpoint. Mark complete batches as kept: from
        then on a kill does not lose them."""
        for batch in self.batches[: self.num_complete]:
            batch.is_kept = True
        every = [each.fresh.table for each in [*self.unobserved, *self.batches]]
        numbered = [table.with_columns(batch=pl.lit(number)) for number, table in enumerate(every)]
        return pl.concat([NO_ROLLOUTS.table.with_columns(batch=pl.lit(0)), *numbered])

    def numbers(self) -> dict[str, Any]:
        """Return the state except for the rollouts, as JSON for a checkpoint."""
        return {
            "num_requested": self.num_requested,
            "num_complete": self.num_complete,
            "num_unobserved": len(self.unobserved),
            "batches": [numbers_of(batch) for batch in [*self.unobserved, *self.batches]],
        }

    def restore(self, numbers: Mapping[str, Any], table: pl.DataFrame) -> None:
        """Restore the state of the queue from a checkpoint."""
        self.num_requested = numbers["num_requested"]
        self.num_complete, num = numbers["num_complete"], numbers["num_unobserved"]
        batches = [
            batch_of(values, Rollouts.of(table.filter(pl.col("batch") == place).select([*COLUMNS])))
            for place, values in enumerate(numbers["batches"])
        ]
        self.unobserved, self.batches = batches[:num], batches[num:]
        for batch in batches[: num + self.num_complete]:
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
