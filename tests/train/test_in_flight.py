"""New weights in the middle of completions: the version of each token is recorded, and no token is
older than the limit. With vLLM's servers see tests/engines/test_replicas.py."""

import dataclasses
import itertools
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch

from tasks.common.artifacts import STEPS
from tasks.common.files import ArtifactError
from tasks.common.params import ParamsError
from tasks.engines.engine import Engine, Request, Samples
from tasks.train.loop.ahead.queue import ages
from tasks.train.loop.trainer import Trainer
from tests.patience import PATIENCE
from tests.train import test_sharding as sharding
from tests.train.recorded import check_repeated, from_record, rollouts_of
from tests.train.test_asynchronous import SIZES, delayed
from tests.train.test_whole_runs import changes_of
from tests.train.worlds import make_trainer, make_world, run, run_with_kills, sampled

CHANGES = {
    "max_staleness": 1,
    "in_flight_updates": True,
    "learning_rate": 3e-2,
    "advantage": {"method": "rloo"},
}
POLL_SECONDS = 0.01
SAMPLER = "sampler"  # the thread of the asynchronous loop


class Swapping:
    """An engine that takes new weights after the first token of its completions.

    Sampling stops there (`between`) until the weights are new, or until the trainer waits for the
    samples (`is_awaited`). New weights wait until sampling has stopped there, or has ended. So
    weights change in the middle of completions whichever side is fast."""

    shares_weights = False

    def __init__(self, engine: Engine) -> None:
        self.engine, self.policy_version = engine, 0
        self.name, self.version = engine.name, engine.version
        self.prefix_block = engine.prefix_block
        self.condition = threading.Condition(threading.RLock())
        self.is_between = self.is_awaited = False
        self.num_swaps = 0
        self.between: Callable[[], object] = self.wait_for_weights

    def metrics(self) -> dict[str, float]:
        return self.engine.metrics()

    def sleep(self) -> None:
        self.engine.sleep()

    def set_weights(self, weights: Mapping[str, torch.Tensor], version: int | None = None) -> None:
        assert version is not None
        with self.condition:
            self.engine.set_weights(weights)
            self.policy_version = version
            self.condition.notify_all()

    def swap_weights(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        weights = dict(weights)  # ranks gather them together, before any waits for its sampler
        with self.condition:
            while not self.is_between and is_sampling():
                self.condition.wait(POLL_SECONDS)
            self.set_weights(weights, version)
        self.num_swaps += 1

    def await_samples(self, is_awaited: bool) -> None:
        with self.condition:
            self.is_awaited = is_awaited
            self.condition.notify_all()

    def wait_for_weights(self) -> None:
        version = self.policy_version
        if threading.current_thread().name == SAMPLER:  # not the trainer, which only probes
            self.condition.wait_for(lambda: self.is_awaited or self.policy_version != version)

    def part(self, request: Request) -> tuple[Samples, int]:
        with self.condition:
            return self.engine.generate(request), self.policy_version

    def generate(self, request: Request, *more: Any) -> Samples:
        sampling = dataclasses.replace(request.sampling, max_tokens=1)
        with self.condition:
            first, version = self.part(dataclasses.replace(request, sampling=sampling))
            self.is_between = True
            self.condition.notify_all()
            self.between()
            self.is_between = False
        unfinished = [row for row, reason in enumerate(first.finish_reasons) if reason == "length"]
        owner_B = request.owner_B()
        rest = Request(
            [[*request.prompts[owner_B[row]], *first.token_ids[row]] for row in unfinished],
            [1] * len(unfinished),
            [request.seeds[row] + 1 for row in unfinished],
            dataclasses.replace(sampling, max_tokens=request.sampling.max_tokens - 1),
        )
        second, later = self.part(rest)
        versions = [[version] * len(ids) for ids in first.token_ids]
        for place, row in enumerate(unfinished):
            first.token_ids[row] += second.token_ids[place]
            first.logprobs[row] += second.logprobs[place]
            first.finish_reasons[row] = second.finish_reasons[place]
            versions[row] += [later] * len(second.token_ids[place])
        return dataclasses.replace(first, versions=versions)


def is_sampling() -> bool:
    return any(thread.name == SAMPLER for thread in threading.enumerate())


def swapping(found: list[Swapping]) -> Callable[[Trainer], None]:
    def prepare(trainer: Trainer) -> None:
        engine = trainer.collector.engine = Swapping(trainer.collector.engine)
        timed = trainer.state.timed

        @contextmanager
        def noticed(part: str) -> Iterator[None]:
            if part == "wait":
                engine.await_samples(True)
            with timed(part):
                yield
            if part == "wait":
                engine.await_samples(False)

        trainer.state.timed = noticed  # type: ignore[method-assign]
        found.append(engine)

    return prepare


@pytest.mark.parametrize("limit", [1, 3])
def test_versions_of_tokens_are_recorded_and_within_the_limit(
    limit: int, guesser: Path, tmp_path: Path
) -> None:
    layout = make_world(tmp_path / "first", guesser, SIZES)
    engines: list[Swapping] = []
    changes = {**CHANGES, "max_staleness": limit}
    trainer = run(layout, changes, prepare=swapping(engines))
    assert engines[0].num_swaps >= 2
    rows = rollouts_of(layout)
    swapped = rows.filter(pl.col("versions").is_not_null())
    assert (swapped["versions"].list.min() == swapped["version"]).all()
    assert (swapped["versions"].list.max() > swapped["version"]).any()
    assert (swapped["versions"].list.len() == swapped["token_ids"].list.len()).all()
    made = STEPS.frame(trainer.state.steps)["num_updates"].to_numpy()
    before = np.concatenate([[0], np.cumsum(made)])
    age = before[rows["step"].to_numpy()] - rows["version"].to_numpy()
    assert 0 <= age.min() < age.max() <= limit

    # the clock decides which policy samples what; training on a record is deterministic
    again = make_world(tmp_path / "again", guesser, SIZES)
    check_repeated(layout, again, changes, swapping(engines))


def test_steps_begin_while_a_later_batch_is_in_flight(guesser: Path, tmp_path: Path) -> None:
    """The third batch continues only after training on two steps."""
    found = list[bool]()

    def prepare(trainer: Trainer) -> None:
        engine = trainer.collector.engine = Swapping(trainer.collector.engine)
        requests = itertools.count()

        def wait_for_two_steps() -> None:
            if threading.current_thread().name == SAMPLER and next(requests) == 2:
                in_time = engine.condition.wait_for(lambda: engine.policy_version >= 2, PATIENCE)
                found.append(in_time)

        engine.between = wait_for_two_steps

    changes = {**CHANGES, "max_staleness": 2}
    trainer = run(make_world(tmp_path, guesser, SIZES), changes, prepare=prepare)
    assert found == [True]
    assert trainer.state.num_steps == 8


def unhindered(sampling: float, learning: float) -> Callable[[Trainer], None]:
    """Let weights arrive at any time; each side takes up to so many seconds longer."""

    def prepare(trainer: Trainer) -> None:
        engine = Swapping(trainer.collector.engine)
        engine.between = lambda: engine.condition.wait(POLL_SECONDS)
        trainer.collector.engine = engine
        delayed(sampling, learning)(trainer)

    return prepare


@pytest.mark.parametrize("name", ["dapo", "dots_replay"])
def test_requests_depend_neither_on_the_clock_nor_on_kills(
    name: str, guesser: Path, tmp_path: Path
) -> None:
    """The weights are constant, so samples do not depend on the time of an update."""
    changes = {**changes_of(name), **CHANGES, "max_staleness": 3, "learning_rate": 1e-30}
    found = {}
    for side, delays in (("sampling", (0.05, 0.0)), ("learning", (0.0, 0.05)), ("killed", (0, 0))):
        layout = make_world(tmp_path / side, guesser, SIZES)
        kills = (2, 5) if side == "killed" else ()
        trainer = run_with_kills(layout, changes, kills, unhindered(*delays))
        rows = rollouts_of(layout)
        columns = ["step", "group", "sample_index", "prompt_id", "token_ids", "reward", "replayed"]
        states = {k: v for k, v in trainer.slots.states().items() if k.startswith("control.")}
        found[side] = rows.select(columns).rows(), {k: v.tolist() for k, v in states.items()}
    assert len(found["sampling"][0]) > 20
    assert found["sampling"] == found["learning"] == found["killed"]


def test_an_interrupt_waits_for_the_batch_in_flight(guesser: Path, tmp_path: Path) -> None:
    layout = make_world(tmp_path, guesser, SIZES)

    def interrupting(trainer: Trainer) -> None:
        unhindered(0.3, 0.0)(trainer)
        record = trainer.add_row

        def record_and_interrupt(*arguments: Any) -> dict[str, Any]:
            row = record(*arguments)
            if row["step"] == 3:
                signal.raise_signal(signal.SIGINT)
            return row

        trainer.add_row = record_and_interrupt  # type: ignore[method-assign]

    changes = {**CHANGES, "max_staleness": 3}
    with pytest.raises(KeyboardInterrupt, match="stopped after step 3, which is checkpointed"):
        run(layout, changes, prepare=interrupting)
    assert not is_sampling()
    assert run(layout, changes, prepare=unhindered(0.0, 0.0)).state.num_steps == 8


def one_side_slow(trainer: Trainer) -> None:
    """Delay sampling on the second rank, and training on the first."""
    is_second = trainer.run.ranks.rank == 1
    unhindered(0.1 * is_second, 0.1 * (not is_second))(trainer)


def test_the_requests_of_two_ranks_do_not_depend_on_their_speeds(
    guesser: Path, tmp_path: Path
) -> None:
    case = {"train": {**CHANGES, "max_staleness": 2, "learning_rate": 1e-30}}
    found = {}
    for name, size, shard in (("alone", 0, "none"), ("whole", 2, "none"), ("shards", 2, "fsdp2")):
        layout = sharding.world(tmp_path / name, guesser, case, shard)
        sharding.run(layout, size, 8, tmp_path / f"{name}-out", one_side_slow)
        found[name] = sharding.sampled(layout)
    assert found["whole"] == found["alone"]
    assert found["shards"] == found["alone"]


def test_a_server_with_old_weights_ends_the_run(guesser: Path, tmp_path: Path) -> None:
    trainer = make_trainer(make_world(tmp_path, guesser, SIZES), **CHANGES)
    trainer.collector.engine = Swapping(trainer.collector.engine)
    trainer.learner.version = 3
    with (
        closing(trainer.collector.grader),
        pytest.raises(ArtifactError, match="after 0 updates instead of the one after 3"),
    ):
        sampled(trainer)


def test_tokens_of_policies_that_are_not_allowed_end_the_run(guesser: Path, tmp_path: Path) -> None:
    layout = make_world(tmp_path / "first", guesser, SIZES)
    run(layout, CHANGES, prepare=swapping([]))
    for other in (100, -2):
        later = pl.when(pl.col("step") > 5).then(other).otherwise(0)
        rows = rollouts_of(layout).with_columns(
            version=(pl.col("version") + later).clip(0), versions=pl.lit(None, pl.List(pl.Int64))
        )
        again = make_world(tmp_path / str(other), guesser, SIZES)
        prepare = from_record(rows, swapping([]))
        with pytest.raises(ArtifactError, match=r"tokens are of the policy after \d+ updates"):
            run(again, CHANGES, prepare=prepare)


def test_an_engine_without_in_flight_updates_is_refused(guesser: Path, tmp_path: Path) -> None:
    with pytest.raises(ParamsError, match="the engine hf cannot load weights while it samples"):
        run(make_world(tmp_path, guesser, SIZES), CHANGES)


def test_a_checkpoint_keeps_the_versions_of_tokens(guesser: Path, tmp_path: Path) -> None:
    layout = make_world(tmp_path, guesser, SIZES)
    trainer = make_trainer(layout, **CHANGES)
    engine = trainer.collector.engine = Swapping(trainer.collector.engine)
    with closing(trainer.collector.grader):
        weights = {name: 1.01 * tensor for name, tensor in trainer.learner.weights().items()}
        engine.between = lambda: engine.swap_weights(weights, 2)
        trainer.queue.fill(version=0)
    table = trainer.queue.batches[0].fresh.table
    trainer.queue.restore(trainer.queue.numbers(), trainer.queue.table())
    (kept,) = trainer.queue.take(1)
    assert kept.fresh.table.equals(table)
    assert set(kept.fresh.versions_N()) == {0, 2}
    assert (kept.fresh.versions_B == 0).all()
    age = ages(2, kept)
    assert age["staleness"] == 2
    assert 0 < age["staleness_mean"] < 2
