"""More groups in flight than a step takes (`train.over_provision`): a step ends sampling when as
many groups as it asked for are whole, and the others go on in the next, from the tokens that they
have (APRIL, arXiv 2509.18521).

A synchronous step waits for its longest completion while the engine runs empty; with more in flight
it stays full. Control is asked one request ahead, and of that so many groups are sampled, too. Each
step takes as many groups as its own request had, those that were asked for first before others, so
none is lost and none is left at the end. A group that would be older than `train.max_staleness` in
the next step is waited for. Whose tokens they are is kept, and the importance weights of the loss
correct for it.

What is whole first is short: batches are easier early and longer late than those without. Left out:
controls that ask again once they see a step's rollouts, and running beside the update."""

import math
import time
from collections.abc import Sequence
from dataclasses import astuple

import numpy as np
import polars as pl

from tasks.common.files import ArtifactError
from tasks.common.params import ParamsError
from tasks.engines.engine import Request, Samples, StoppableEngine
from tasks.train.buffer import flat
from tasks.train.loop.ahead import ages
from tasks.train.loop.batch import Batch
from tasks.train.loop.collect import Cost, fresh_rollouts
from tasks.train.loop.groups import GOING, Due, Group, Pool, Row
from tasks.train.loop.state import TrainingError
from tasks.train.loop.trainer import CONTROL_STREAM, SAMPLING_STREAM, Trainer
from tasks.train.rollouts import GroupRequest, Rollouts, mixed_versions
from tasks.train.slots import SoFar


def sample(trainer: Trainer) -> Batch | None:
    """The graded rollouts of a step; None at the end of the run."""
    pool, collector = trainer.state.pool, trainer.collector
    if trainer.is_done():
        return None
    began = time.perf_counter()
    num_requests = 1 if trainer.is_done(trainer.state.num_steps + 1) else 2
    while len(pool.due) < num_requests and ask(trainer, pool):
        pass
    if not pool.due:
        return None
    due = pool.due.pop(0)
    num = due.num_groups + num_extra(trainer, due)
    record = collector.record_of(trainer.state.num_steps)
    if record is None:
        pool.groups[:num], cost = advance(trainer, pool.groups[:num], due.num_groups)
        whole = [group for group in pool.groups[:num] if group.is_whole][: due.num_groups]
    else:
        whole = find_recorded(trainer, record, pool.groups[:num])
        cost = cost_of(trainer, whole)
    if len(whole) != due.num_groups:
        what = "sampling ended" if record is None else "this is the record of another run"
        raise TrainingError(
            f"{trainer.where()}: {len(whole)} groups are whole, and control asked for "
            f"{due.num_groups}: {what}"
        )
    for group in pool.groups[:num]:
        group.since = trainer.state.num_steps if group.since < 0 else group.since
    taken = set(map(id, whole))
    pool.groups = [group for group in pool.groups if id(group) not in taken]
    pool.progress = due.progress
    fresh = graded(trainer, whole)
    request = GroupRequest(
        fresh.prompt_rows_Q, np.bincount(fresh.group_B), due.pass_number, due.phase
    )
    judged, seconds = collector.take_judged(), time.perf_counter() - began
    return Batch(request, fresh, due.replayed, [cost], judged, seconds, due.progress)


def ask(trainer: Trainer, pool: Pool) -> bool:
    """Have control ask for a step's groups; False at the end of its plan."""
    control, promised = trainer.slots.control, sum(due.replayed for due in pool.due)
    replayed = trainer.start(promised=promised).replayed
    choices = trainer.rng(CONTROL_STREAM, pool.asked)
    request = control.next(SoFar(None, 0, replayed), choices)
    if request is None:
        return False
    if (request.extends, request.sampling, request.prefixes) != (None, None, None):
        raise ParamsError(
            f"train.control {trainer.run.settings.control['method']} asks for prompts in ways that "
            "train.over_provision does not carry over: set that to 1.0"
        )
    seeds = trainer.rng(SAMPLING_STREAM, pool.asked)
    for prompt_row, count in zip(
        request.prompt_rows.tolist(), request.counts.tolist(), strict=True
    ):
        rows = [Row(seed) for seed in seeds.integers(0, 2**63 - 1, size=count).tolist()]
        pool.groups.append(Group(prompt_row, rows))
    pool.due.append(
        Due(len(request.counts), request.pass_number, request.phase, replayed, control.progress())
    )
    pool.asked += 1
    return True


def num_extra(trainer: Trainer, due: Due) -> int:
    """How many groups more than a step's own are in flight: no more than the next one takes, so
    that what is left over can be learned from there; none of another phase of the plan."""
    share, later = trainer.run.settings.over_provision - 1.0, trainer.state.pool.due
    if not later or later[0].phase != due.phase:
        return 0
    return min(math.ceil(share * due.num_groups), later[0].num_groups)


def advance(trainer: Trainer, groups: list[Group], num: int) -> tuple[list[Group], Cost]:
    """The groups after sampling until `num` of them are whole, and those that must not wait for the
    next step; what that took. Every rank samples its share of both."""
    run, collector = trainer.run, trainer.collector
    ranks, step = collector.run.ranks, trainer.state.num_steps
    mine = ranks.shard(groups)
    left = [sum(row.reason == GOING for row in group.rows) for group in mine]
    oldest = step - run.settings.max_staleness
    late = {place for place, group in enumerate(mine) if left[place] and 0 <= group.since <= oldest}
    num_wanted = len(ranks.shard(range(num)))
    request, rows = request_for(trainer, mine)
    owner = {id(row): place for place, group in enumerate(mine) for row in group.rows}

    def is_enough() -> bool:
        return not late and left.count(0) >= num_wanted

    def ended(row: int, token_ids: Sequence[int], reason: str) -> bool:
        place = owner[id(rows[row])]
        left[place] -= 1
        if not left[place]:
            late.discard(place)
        return not left[place] and is_enough()

    cost = Cost(0.0, 0, 0)
    if not is_enough():
        samples = stoppable(trainer).generate_until(request, ended)
        cost = collector.cost(request, samples)
        for row, token_ids, logprobs, reason in zip(
            rows, samples.token_ids, samples.logprobs, samples.finish_reasons, strict=True
        ):
            row.token_ids += token_ids
            row.logprobs += logprobs
            row.versions += [trainer.learner.version] * len(token_ids)
            row.reason = reason
    costs = ranks.all_gather(cost)
    total = Cost(*(sum(values) for values in zip(*map(astuple, costs), strict=True)))
    return ranks.gather_shards(mine, len(groups)), total


def stoppable(trainer: Trainer) -> StoppableEngine:
    """The engine. Raises ParamsError for one that cannot be stopped."""
    engine = trainer.collector.engine
    if not isinstance(engine, StoppableEngine):
        raise ParamsError(
            f"train.over_provision is above 1, and the engine {engine.name} cannot stop "
            "completions and go on with them: set it to 1.0"
        )
    return engine


def request_for(trainer: Trainer, groups: Sequence[Group]) -> tuple[Request, list[Row]]:
    """The request for all that is not written yet, and the row of each completion."""
    prompts = trainer.prompts.token_ids(np.array([group.prompt_row for group in groups], np.int64))
    asked, counts, written, rows = list[list[int]](), list[int](), list[int](), list[Row]()
    for prompt, group in zip(prompts, groups, strict=True):
        going = [row for row in group.rows if row.reason == GOING]
        begun = [row for row in going if row.token_ids]
        parts = [[row] for row in begun]
        if len(begun) < len(going):  # they share a prefill
            parts.append([row for row in going if not row.token_ids])
        for part in parts:
            asked.append([*prompt, *part[0].token_ids])
            counts.append(len(part))
            written.append(len(part[0].token_ids))
            rows += part
    seeds = [row.seed for row in rows]
    return Request(asked, counts, seeds, trainer.run.sampling, written=written), rows


def graded(trainer: Trainer, groups: Sequence[Group]) -> Rollouts:
    """Whole groups as a step's fresh rollouts."""
    prompts = trainer.prompts
    prompt_rows = np.array([group.prompt_row for group in groups], np.int64)
    group_B = np.repeat(np.arange(len(groups)), [len(group.rows) for group in groups])
    rows = [row for group in groups for row in group.rows]
    samples = Samples(
        [row.token_ids for row in rows],
        [row.logprobs for row in rows],
        [row.reason for row in rows],
    )
    versions_B = np.array([min(row.versions) for row in rows])
    lengths_B = np.array([len(row.token_ids) for row in rows])
    every_N = flat([row.versions for row in rows], np.int64)
    versions = versions_B, mixed_versions(versions_B, every_N, lengths_B)
    token_ids = prompts.token_ids(prompt_rows)
    judged = trainer.collector.grade(prompts, prompt_rows[group_B], samples)
    return fresh_rollouts(prompt_rows, token_ids, group_B, samples, judged, versions)


def find_recorded(trainer: Trainer, record: pl.DataFrame, groups: Sequence[Group]) -> list[Group]:
    """The groups that the step of the recorded run took, as they were recorded. Raises
    ArtifactError where it had others than these, or tokens of a later policy."""
    step, ids, latest = trainer.state.num_steps, trainer.prompts.ids, trainer.learner.version
    found = list[Group]()
    left = list(groups)
    for _, table in record.sort("group", "sample_index").group_by("group", maintain_order=True):
        name = (table["prompt_id"][0], len(table))
        matches = (group for group in left if (ids[group.prompt_row], len(group.rows)) == name)
        match = next(matches, None)
        if match is None:
            raise ArtifactError(
                f"step {step}: the record has {len(table)} rollouts of {name[0]}, which are not in "
                "flight: it is the record of another run"
            )
        left = [group for group in left if group is not match]
        match.rows = [
            Row(0, ids, logprobs, versions or [version] * len(ids), reason)
            for ids, logprobs, versions, version, reason in table.select(
                "token_ids", "sampler_logprobs", "versions", "version", "finish_reason"
            ).rows()
        ]
        if max(max(row.versions) for row in match.rows) > latest:
            raise ArtifactError(
                f"step {step}: the record has tokens of a later policy than that after {latest} "
                "updates: it is the record of another run"
            )
        found.append(match)
    return found


def cost_of(trainer: Trainer, groups: Sequence[Group]) -> Cost:
    """What sampling these groups took, from the versions of their tokens: at each other version
    they were read again."""
    prompts = trainer.prompts.token_ids(np.array([group.prompt_row for group in groups], np.int64))
    counts = [len(group.rows) for group in groups]
    rows = [row for group in groups for row in group.rows]
    samples = Samples(
        [row.token_ids for row in rows],
        [row.logprobs for row in rows],
        [row.reason for row in rows],
        versions=[row.versions for row in rows],
    )
    request = Request(prompts, counts, [row.seed for row in rows], trainer.run.sampling)
    return trainer.collector.cost(request, samples)


def measurements(trainer: Trainer, batch: Batch, version: int) -> dict[str, float]:
    """For the record: how old the tokens of a batch were for this version of the policy, and what
    is left in flight."""
    num_carried = sum(group.since >= 0 for group in trainer.state.pool.groups)
    return {**ages(version, batch), "carried_groups": float(num_carried)}
