"""The groups on their way from control's request to a step: they wait, are in flight, are complete.

    control asks -> Batch of groups -> sampled and graded -> complete -> taken by a step

`train.max_staleness` and `train.over_provision` decide how much of it there is at once:

- 0 and 1.0: a step asks, samples and takes its own batch;
- `max_staleness` above 0: the batches of the next steps are sampled, from one policy, while as many
  are learned from (`TrainSettings.num_ahead`; AReaL, arXiv 2505.24298; periodic asynchrony, arXiv
  2511.18871);
- `over_provision` above 1: groups of the next step are in flight beside a step's own. Sampling ends
  when as many groups as the step asked for are complete. The others go on later, from the tokens
  that they have (APRIL, arXiv 2509.18521). A group that would be older than `max_staleness` in the
  next step is waited for. Each step takes as many groups as its own request had, those that were
  asked for first before others, so none is lost and none is left at the end.

Which policy samples what follows from the steps and not from the clock, but for weights that are
replaced in the middle of completions (`train.in_flight_updates`). What is complete first is short:
with `over_provision` batches are easier early and longer late. The importance weights of the loss
correct for older policies."""

import itertools
import math
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import polars as pl

from tasks.common.params import ParamsError
from tasks.common.spending import CellBudget
from tasks.engines.settings import Sampling
from tasks.train.loop.spending import Spending
from tasks.train.loop.state import ROUNDING, TrainingError
from tasks.train.rollouts import GroupRequest, Prompts, Rollouts
from tasks.train.sampling import recorded
from tasks.train.sampling.collector import Collector, Cost, Until
from tasks.train.sampling.groups import Group, Rollout, groups_in, rollouts_of
from tasks.train.settings import BatchSettings, TrainSettings
from tasks.train.slots import Slots, SoFar

SAMPLING_STREAM, LEARNING_STREAM, CONTROL_STREAM = 0, 1, 2  # of a step's random numbers
KEPT = (  # of a batch, in a checkpoint, beside its groups and its cost
    "step",
    "replayed",
    "num_requests",
    "asked",
    "pass_number",
    "phase",
    "progress",
    "wanted",
    "spent",
    "judged_flops",
    "seconds",
)


def random_numbers(seed: int, step: int, stream: int) -> np.random.Generator:
    """The random numbers of a step for one purpose. They depend on nothing else, so a resumed run
    repeats what a kill interrupted."""
    return np.random.default_rng([seed, step, stream])


def cut(request: GroupRequest, most: int, batch: BatchSettings) -> GroupRequest:
    """Return the request with at most so many rollouts, the last groups cut: it is the end of a
    budget. A batch that counts prompts has whole groups."""
    if batch.unit == "prompts":
        return request
    before = np.cumsum(request.counts) - request.counts
    counts = np.clip(most - before, 0, request.counts)
    kept = counts > 0
    return replace(request, prompt_rows=request.prompt_rows[kept], counts=counts[kept])


@dataclass
class Batch:
    """What a step learns from: its groups, and what replay adds to them (in the batch's unit).

    `progress` is the share of the run that is done with it; of a budget it is predicted until the
    step is learned from, and `spent` is 0 until then. `wanted` is how much of the batch's unit
    control was to ask for. `cost`, `judged_flops` and `seconds` are what sampling and judging took.
    `choices` and `seeds` are the step's random numbers of control and of completions. `asked` are
    the places of the groups that control's last request is about, until they are sampled, and
    `sampling` its settings where it has its own. A complete one, for example: Batch(step=7,
    replayed=0, phase=1, progress=0.4, groups=[Group(...), Group(...)], cost=Cost(2.1e9, 913, 8),
    seconds=1.3, ...)."""

    step: int
    replayed: int
    choices: np.random.Generator = field(repr=False, compare=False)
    seeds: np.random.Generator = field(repr=False, compare=False)
    num_requests: int = 0
    pass_number: int = 0
    phase: int = 0
    progress: float = 0.0
    wanted: int = 0
    spent: float = 0.0
    cost: Cost = field(default_factory=Cost)
    judged_flops: float = 0.0
    seconds: float = 0.0
    groups: list[Group] = field(default_factory=list)
    asked: list[int] = field(default_factory=list)
    sampling: Sampling | None = None
    is_kept: bool = field(default=False, compare=False)  # complete, in a checkpoint
    fresh: Rollouts = field(init=False, repr=False, compare=False)  # once its groups are complete


class RolloutBuffer:
    """The batches that were asked for and not taken, in the order of their steps; the first
    `num_complete` of them are complete. `progress` is the share of the run that is done with those
    that were taken; of these, control has yet to observe the `unobserved`. With a budget
    (`spending`) the run ends where that is spent, and not with the plan. A thread may fill the
    buffer while another takes or saves: all of it changes under `lock`, and groups are sampled in
    copies."""

    def __init__(
        self,
        settings: TrainSettings,
        seed: int,
        slots: Slots,
        collector: Collector,
        prompts: Prompts,
        budget: CellBudget | None = None,
    ) -> None:
        self.settings, self.seed, self.slots = settings, seed, slots
        self.spending = None if budget is None else Spending(budget, settings.batch.size)
        self.first_share = 0.0 if self.spending is None else self.spending.first_share
        self.collector, self.prompts = collector, prompts
        self.batches: list[Batch] = []
        self.unobserved: list[Batch] = []
        self.num_complete = self.num_asked = 0
        self.progress = self.first_share
        self.sampled_seconds = 0.0
        self.began: float | None = None  # and since when the batch in flight is sampled
        self.replayed = deque[int]()  # of the batches that are asked for next
        self.lock = threading.Condition()

    @property
    def num_early(self) -> int:
        """How many batches are asked for before it is their turn."""
        return int(self.settings.over_provision > 1.0)

    @property
    def num_sampled(self) -> int:
        """The steps whose batches are complete, from the first of the run on."""
        return self.num_asked - (len(self.batches) - self.num_complete)

    @property
    def seconds(self) -> float:
        """Of sampling so far."""
        with self.lock:
            now = time.perf_counter() - self.began if self.began else 0.0
            return self.sampled_seconds + now

    def reserve(self, num_steps: int, taken: Sequence[Batch] = ()) -> None:
        """Fix what replay adds to the batches of the first `num_steps`, before they are sampled.
        What it holds changes meanwhile, and those that were `taken` are learned from."""
        with self.lock:
            promised = sum(batch.replayed for batch in [*taken, *self.batches])
            promised += sum(self.replayed)
            while self.num_asked + len(self.replayed) < num_steps + self.num_early:
                self.replayed.append(int(self.slots.replay.room(self.settings.batch, promised)))
                promised += self.replayed[-1]

    def fill(self, version: int) -> bool:
        """Complete one more batch, with the policy after `version` updates; False at the end of the
        run. It touches nothing that learning changes."""
        with self.lock:
            self.began = time.perf_counter()
            if self.settings.in_flight_updates:  # what control has seen must not follow the clock
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
        """The next complete batches, at most `num`, and none after the one with which the share
        `until` of the run is done; none at the end of the run."""
        with self.lock:
            taken = self.batches[: min(num, self.num_complete)]
            if until is not None:
                done = [batch.progress >= until - ROUNDING for batch in taken]
                taken = taken[: done.index(True) + 1] if any(done) else taken
            del self.batches[: len(taken)]
            self.num_complete -= len(taken)
            self.unobserved += taken
            if taken:
                self.progress = taken[-1].progress
            return taken

    def observe(self, num_steps: int) -> None:
        """Let those that decide what is sampled learn from what the first `num_steps` learned from.
        They must not be asked meanwhile."""
        while self.unobserved and self.unobserved[0].step < num_steps:
            batch = self.unobserved.pop(0)
            self.slots.control.observe(batch.fresh)
            self.slots.generate.observe(batch.fresh)
            if self.spending is not None:
                self.spending.observe(batch.spent, batch.wanted)

    def ask(self) -> bool:
        """Have control ask for the groups of the next step; False at the end of the run."""
        step, limit = self.num_asked, self.settings.max_steps
        is_over = self.spending is not None and self.spending.is_over(self.num_ahead)
        if is_over or (limit is not None and step >= limit):
            return False
        batch = Batch(step, self.replayed[0], *self.random_numbers(step))
        if not self.ask_for_more(batch):
            return False
        self.replayed.popleft()
        self.batches.append(batch)
        self.num_asked += 1
        return True

    def ask_for_more(self, batch: Batch) -> bool:
        """Have control ask for groups of a batch, once it has seen those that the batch has; False
        where it wants no more."""
        control, spending, ahead = self.slots.control, self.spending, self.num_ahead
        rollouts = batch.fresh if batch.num_requests else None
        so_far = SoFar(rollouts, batch.num_requests, batch.replayed)
        if spending is not None:
            batch.wanted = batch.wanted or spending.most(ahead)
            so_far = replace(so_far, done=spending.done(ahead), most=batch.wanted)
        request = control.next(so_far, batch.choices)
        if request is None:
            return False
        if not batch.num_requests:
            batch.pass_number, batch.phase = int(request.pass_number), int(request.phase)
        batch.num_requests += 1
        batch.progress = float(control.progress())
        if spending is not None:
            batch.progress = spending.progress(ahead + 1)
            if batch.num_requests == 1 and batch.wanted < spending.size:
                request = cut(request, batch.wanted, self.settings.batch)
        self.add_groups(batch, request)
        return True

    @property
    def num_ahead(self) -> int:
        """The batches that control has yet to observe."""
        return len(self.unobserved) + len(self.batches)

    @property
    def spent(self) -> float:
        """What of the budget the profile and the steps that were learned from took."""
        assert self.spending is not None
        return self.spending.spent + sum(batch.spent for batch in self.unobserved)

    def add_groups(self, batch: Batch, request: GroupRequest) -> None:
        """Add what control asks for to a batch. Raises ValueError for a request that extends a
        group of another prompt."""
        special = (request.extends, request.sampling, request.prefixes)
        if self.num_early and any(each is not None for each in special):
            raise ParamsError(
                f"train.control {self.settings.control['method']} asks for prompts in ways that "
                "train.over_provision does not carry over: set that to 1.0"
            )
        token_ids = self.prompts.token_ids(request.prompt_rows)
        if request.prefixes is not None:
            token_ids = [ids + more for ids, more in zip(token_ids, request.prefixes, strict=True)]
        numbers, counts = request.groups(len(batch.groups)).tolist(), request.counts.tolist()
        seeds = iter(batch.seeds.integers(0, 2**63 - 1, size=sum(counts)).tolist())
        for number, row, prompt, count in zip(
            numbers, request.prompt_rows.tolist(), token_ids, counts, strict=True
        ):
            if number == len(batch.groups):
                batch.groups.append(Group(row, prompt))
            group = batch.groups[number]
            if (group.prompt_row, group.prompt) != (row, prompt):
                raise ValueError("a request extends a group of another prompt")
            group.rollouts += [Rollout(seed) for seed in itertools.islice(seeds, count)]
        batch.asked, batch.sampling = [*dict.fromkeys(numbers)], request.sampling

    def complete(self, batch: Batch, later: Sequence[Batch], version: int) -> None:
        """Sample and grade the groups of a batch until control wants no more of them."""
        record = recorded.of_step(self.collector.recorded, batch.step)
        while batch.asked:
            asked = [batch.groups[number] for number in batch.asked]
            groups = [group.copy() for group in [*asked, *self.beside(batch, later)]]
            if record is None:
                until = Until(len(batch.groups), batch.step - self.settings.max_carried)
                groups, cost = self.collector.collect(
                    self.prompts,
                    groups,
                    version,
                    batch.sampling,
                    until if self.num_early else None,
                )
            else:
                groups, cost = self.take_recorded(record, batch, groups, version)
            with self.lock:
                self.put_back(batch, later, groups)
                batch.cost += cost
                batch.judged_flops += self.collector.take_judged()
                batch.asked, batch.fresh = [], rollouts_of(batch.groups)
                if not self.ask_for_more(batch):
                    self.count_complete(batch, record)

    def count_complete(self, batch: Batch, record: pl.DataFrame | None) -> None:
        """Count a batch of which control wants no more as complete."""
        if record is not None:
            recorded.check_all(record, batch.groups, batch.step)
        assert self.began is not None
        batch.seconds = time.perf_counter() - self.began
        self.sampled_seconds, self.began = self.sampled_seconds + batch.seconds, None
        self.num_complete += 1

    def beside(self, batch: Batch, later: Sequence[Batch]) -> list[Group]:
        """The groups of the next batch that are in flight beside this one's: no more than it will
        take itself, and none of another phase of the plan."""
        if not later or later[0].phase != batch.phase:
            return []
        num = math.ceil((self.settings.over_provision - 1.0) * len(batch.groups))
        return later[0].groups[:num]

    def take_recorded(
        self, record: pl.DataFrame, batch: Batch, groups: list[Group], version: int
    ) -> tuple[list[Group], Cost]:
        """As `Collector.collect`, with the rollouts of the record of this step."""
        ids, places = self.prompts.ids, [*range(len(groups))]
        if self.num_early:
            places, found = recorded.chosen(record, groups, ids, batch.step)
        else:
            found = recorded.of_groups(record, groups, batch.asked, ids, batch.step)
            is_ours = batch.sampling in (None, self.collector.run.sampling)
            if not (self.settings.in_flight_updates and is_ours):
                recorded.set_versions(found, version if is_ours else -1)
        taken, cost = self.collector.take_recorded(
            self.prompts, [groups[place] for place in places], found
        )
        # those that the recorded step took come first, in its order
        return [*taken, *(group for place, group in enumerate(groups) if place not in places)], cost

    def put_back(self, batch: Batch, later: Sequence[Batch], groups: Sequence[Group]) -> None:
        """Put sampled groups in the place of those that were copied. With others in flight beside
        them the batch gets the first complete ones; the others are the next batch's now."""
        for group in groups:
            group.since = batch.step if group.since < 0 else group.since
        if not self.num_early:
            for number, group in zip(batch.asked, groups, strict=True):
                batch.groups[number] = group
            return
        num = len(batch.groups)
        complete = [group for group in groups if group.is_complete][:num]
        if len(complete) != num:
            what = "sampling ended"
            if self.collector.recorded is not None:
                what = "this is the record of another run"
            raise TrainingError(
                f"step {batch.step}: {len(complete)} groups are whole, and control asked for "
                f"{num}: {what}"
            )
        taken = set(map(id, complete))
        batch.groups = complete
        if later:
            later[0].groups[: len(groups) - num] = [g for g in groups if id(g) not in taken]

    def random_numbers(self, step: int) -> tuple[np.random.Generator, np.random.Generator]:
        """Those of control and of completions."""
        streams = (CONTROL_STREAM, SAMPLING_STREAM)
        control, completions = (random_numbers(self.seed, step, stream) for stream in streams)
        return control, completions

    def groups(self) -> list[list[Group]]:
        """The groups of each batch, for a checkpoint: what is complete is not lost by a kill from
        then on."""
        for batch in self.batches[: self.num_complete]:
            batch.is_kept = True
        return [[*batch.groups] for batch in [*self.unobserved, *self.batches]]

    def numbers(self) -> dict[str, Any]:
        """What else `restore` needs, as JSON has it."""
        return {
            "progress": self.progress,
            "spending": None if self.spending is None else asdict(self.spending),
            "num_asked": self.num_asked,
            "num_complete": self.num_complete,
            "num_unobserved": len(self.unobserved),
            "replayed": [*self.replayed],
            "batches": [numbers_of(batch) for batch in [*self.unobserved, *self.batches]],
        }

    def restore(self, numbers: Mapping[str, Any], table: pl.DataFrame) -> None:
        """Put the buffer where a checkpoint was made."""
        self.progress, self.num_asked = numbers["progress"], numbers["num_asked"]
        self.num_complete, num = numbers["num_complete"], numbers["num_unobserved"]
        if self.spending is not None:
            self.spending.spent = numbers["spending"]["spent"]
            self.spending.costs = numbers["spending"]["costs"]
        self.replayed = deque(numbers["replayed"])
        found = [
            batch_of(values, groups_in(table, place))
            for place, values in enumerate(numbers["batches"])
        ]
        self.unobserved, self.batches = found[:num], found[num:]
        for batch in found[: num + self.num_complete]:
            batch.is_kept, batch.fresh = True, rollouts_of(batch.groups)


def numbers_of(batch: Batch) -> dict[str, Any]:
    """A batch without its groups, as JSON has it."""
    return {
        **{name: getattr(batch, name) for name in KEPT},
        "cost": asdict(batch.cost),
        "sampling": None if batch.sampling is None else asdict(batch.sampling),
        "choices": batch.choices.bit_generator.state,
        "seeds": batch.seeds.bit_generator.state,
    }


def batch_of(numbers: Mapping[str, Any], groups: list[Group]) -> Batch:
    """The inverse of `numbers_of`."""
    choices, seeds = np.random.default_rng(), np.random.default_rng()
    choices.bit_generator.state, seeds.bit_generator.state = numbers["choices"], numbers["seeds"]
    own = numbers["sampling"]
    return Batch(
        **{name: numbers[name] for name in KEPT},
        cost=Cost(**numbers["cost"]),
        sampling=None if own is None else Sampling(**own),
        choices=choices,
        seeds=seeds,
        groups=groups,
    )
