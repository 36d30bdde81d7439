"""The asynchronous loop: a thread samples the next batches while this one learns from the last
(`train.max_staleness` above 0).

Sampling goes in rounds. While the batches of a round are learned from, those of the next are
sampled, all from the policy as it was when the round began. Then both sides wait for each other,
control learns of the round that was trained, the engine gets the new weights, and a probe says that
it has them. A round of n batches is learned from n to 2n - 1 steps after its policy, so n is half
of what `train.max_staleness` allows. The importance weights of the loss correct for the difference,
as they do for any sampler (AReaL, arXiv 2505.24298; periodic asynchrony, arXiv 2511.18871).

Which policy samples which batch follows from the steps alone, and not from the clock: a run gives
the same result whichever side is faster, and a resumed one the same as one that was not killed.

With `train.in_flight_updates` the engine gets the weights after every batch instead, while it
samples: a completion goes on with the new policy, and says of each token which one wrote it
(PipelineRL, arXiv 2509.19128). Its tokens are younger for it, and the limit stands; but what
samples what then follows from the clock.

Left out: branches (`train.branches`)."""

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from tasks.common.files import ArtifactError
from tasks.common.progress import progress
from tasks.train.loop.ahead import Ahead, ages, num_a_round
from tasks.train.loop.batch import Batch, Start
from tasks.train.loop.checkpoint import Checkpoints
from tasks.train.loop.save import resume_ahead, save
from tasks.train.loop.sync import (
    Before,
    Record,
    learn,
    measurements,
    note,
    show,
    stop_requested,
)
from tasks.train.loop.trainer import Trainer
from tasks.train.settings import CheckpointSettings


def train(
    trainer: Trainer,
    checkpoints: Checkpoints,
    settings: CheckpointSettings,
    record: Record,
    num_rollouts: int | None = None,
    chosen: Path | None = None,
) -> dict[str, float]:
    """As `sync.train`. An interrupt ends the run after the round in flight."""
    ranks, state = trainer.run.ranks, trainer.state
    ahead = resume_ahead(trainer, checkpoints, chosen)
    trainer.score_replay()
    lost = checkpoints.count_lost(state.num_steps) if ranks.is_main else {}
    saved = time.monotonic()
    with (
        stop_requested() as stopping,
        progress(num_rollouts, "train", "rollout") as bar,
        Sampler(trainer) as sampler,
    ):
        bar.update(int(state.ledger.rollouts["generate"]))
        if trainer.run.settings.in_flight_updates:
            trainer.sync_engine()
        if ahead is None:
            sampler.begin([])
            ahead = Ahead(sampler.take(), 0.0)
        while True:
            # the engine is idle and has the newest weights
            note(trainer.validate_if_due(ahead.progress), record)
            if not ahead.batches:
                break

            # sample the next round, learn from this one
            sampler.begin(ahead.batches)
            rows = []
            for batch in ahead.batches:
                rows.append(learn_and_record(trainer, batch, checkpoints, record))
                if rows[-1]["updated"]:
                    swap_if_sampling(trainer, sampler)

            # wait, and give sampling what was learned
            batches = sampler.take()
            for batch in ahead.batches:
                trainer.observe_sampled(batch.fresh)
            if any(row["updated"] for row in rows):
                with state.timed("update"):
                    trainer.sync_engine()
            seconds, values = sampler.account(ahead.batches)
            record(values, rows[-1]["step"], rows[-1]["flops_charged"])
            for row in rows:
                show(row, seconds / len(rows), bar, None)
            ahead = Ahead(batches, ahead.batches[-1].progress)

            # checkpoint
            due = ranks.is_main and time.monotonic() - saved >= settings.every_seconds
            stop, due = map(any, zip(*ranks.all_gather((stopping(), due)), strict=True))
            if due or stop:
                save(trainer, checkpoints, ahead)
                saved = time.monotonic()
            if stop:
                checkpoints.wait()
                step = rows[-1]["step"]
                raise KeyboardInterrupt(f"stopped after step {step}, which is checkpointed")
        note(trainer.validate_if_due(ahead.progress, last=True), record)
        save(trainer, checkpoints, ahead)
        checkpoints.wait()
    return lost


def learn_and_record(
    trainer: Trainer, batch: Batch, checkpoints: Checkpoints, record: Record
) -> dict[str, Any]:
    """Learn from a batch; its row of STEPS."""
    before, state = Before(trainer), trainer.state
    version = trainer.learner.version
    if (batch.fresh.token_versions_N() > version).any():
        raise ArtifactError(
            f"{trainer.where()}: the record has tokens of a later policy than this step's: it is "
            "the record of another run"
        )
    row = learn(trainer, batch)
    if trainer.run.ranks.is_main:
        checkpoints.journal(before.work(trainer, row))
    seconds = {**before.seconds(trainer), "generate": batch.seconds}
    state.seconds["generate"] += batch.seconds
    values = {**measurements(row, seconds, {}), **ages(version, batch)}
    record(values, row["step"], row["flops_charged"])
    return row


def swap_if_sampling(trainer: Trainer, sampler: "Sampler") -> None:
    """With `train.in_flight_updates`, give the engine the new weights while it samples. Once a
    round is sampled it gets them before the next one begins."""
    ranks, settings = trainer.run.ranks, trainer.run.settings
    if settings.in_flight_updates and any(ranks.all_gather(sampler.is_busy)):
        with trainer.state.timed("update"):
            trainer.swap_weights()


class Sampler:
    """The thread that samples, a round at a time. It has the engine, the grader, and what control
    remembers to itself until the round is taken."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.num_batches = num_a_round(trainer.run.settings.max_staleness)
        self.num_threads = torch.get_num_threads()
        self.device = torch.cuda.current_device() if torch.cuda.is_available() else None
        self.result: Future[list[Batch]] | None = None
        self.began = time.perf_counter()
        self.waited = 0.0

    def __enter__(self) -> "Sampler":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Wait for a round in flight, whatever came of it; a second interrupt does not."""
        if self.result is not None and kind is not KeyboardInterrupt:
            self.result.exception()

    def begin(self, ahead: Sequence[Batch]) -> None:
        """Sample a round, which comes after the batches `ahead` of it."""
        starts, promised = list[Start](), sum(batch.replayed for batch in ahead)
        for place in range(self.num_batches):
            starts.append(self.trainer.start(len(ahead) + place, promised))
            promised += starts[-1].replayed
        self.result, self.began = Future(), time.perf_counter()
        # it must not keep a process alive that is to end at once
        threading.Thread(
            target=self.work, args=[starts, self.result], name="sampler", daemon=True
        ).start()

    def work(self, starts: Sequence[Start], result: "Future[list[Batch]]") -> None:
        """In the thread: sample the batches, up to the end of the run."""
        try:
            torch.set_num_threads(self.num_threads)  # it is a thread's own setting
            batches = []
            with Stream(self.device):
                for start in starts:
                    batch = self.trainer.sample(start)
                    if batch is None:
                        break
                    batches.append(batch)
            result.set_result(batches)
        except BaseException as error:  # it is raised again in the thread that waits
            result.set_exception(error)

    @property
    def is_busy(self) -> bool:
        """Whether a round is being sampled."""
        return self.result is not None and not self.result.done()

    def take(self) -> list[Batch]:
        """The round's batches, once they are there. Raises what sampling raised."""
        if self.result is None:
            raise RuntimeError("no round was begun")
        before = self.trainer.state.seconds["wait"]
        with self.trainer.state.timed("wait"):
            batches = self.result.result()
        self.result, self.waited = None, self.trainer.state.seconds["wait"] - before
        self.sampled = sum(batch.seconds for batch in batches)
        return batches

    def account(self, learned: Sequence[Batch]) -> tuple[float, dict[str, float]]:
        """The seconds of the round, and the shares of them in which each side waited for the other.
        What control says of itself comes with them."""
        seconds = max(time.perf_counter() - self.began, 1e-9)
        described = self.trainer.slots.control.describe()
        return seconds, {
            "trainer_idle_rate": self.waited / seconds,
            "sampler_idle_rate": max(1.0 - self.sampled / seconds, 0.0),
            "round_batches": float(len(learned)),
            **{f"control/{name}": value for name, value in described.items()},
        }


class Stream:
    """The device of another thread, and a queue of one's own on it: what two threads put into one
    queue is computed in turn."""

    def __init__(self, device: int | None) -> None:
        self.device = device

    def __enter__(self) -> None:
        if self.device is not None:
            torch.cuda.set_device(self.device)
            self.stream = torch.cuda.stream(torch.cuda.Stream())
            self.stream.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self.device is not None:
            self.stream.__exit__(*error)
            torch.cuda.synchronize()
