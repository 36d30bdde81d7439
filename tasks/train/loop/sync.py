"""The synchronous loop, from top to bottom: branch, validate, sample, grade, select, estimate,
update, observe, checkpoint.

Left out: sampling while the update runs (`asynchronous.py`). Sampling more groups than a step takes
is in `provision.py`."""

import logging
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tasks.common.artifacts import TRAIN_ROLLOUTS
from tasks.common.progress import progress
from tasks.train.loop import provision
from tasks.train.loop.batch import Batch
from tasks.train.loop.branches import is_end, leave_trunk_if_due, return_to_trunk
from tasks.train.loop.charge import charge
from tasks.train.loop.checkpoint import Checkpoints
from tasks.train.loop.record import rollout_rows
from tasks.train.loop.save import resume, save
from tasks.train.loop.trainer import LEARNING_STREAM, Trainer
from tasks.train.rollouts import merge
from tasks.train.settings import CheckpointSettings

logger = logging.getLogger(__name__)

Record = Callable[[Mapping[str, Any], int, float], None]


def train(
    trainer: Trainer,
    checkpoints: Checkpoints,
    settings: CheckpointSettings,
    record: Record,
    num_rollouts: int | None = None,
    chosen: Path | None = None,
) -> dict[str, float]:
    """Drive `trainer` to the end of its run, from the checkpoint `chosen` or the newest one on.
    Returns the work that kills lost.

    `record(values, step, charged FLOPs)` is called for every step and every point of the curve;
    `num_rollouts` are those of the whole run, for the progress bar. KeyboardInterrupt (Ctrl-C,
    SIGTERM) is raised after the step in flight has been finished and checkpointed.
    """
    ranks, state, control = trainer.run.ranks, trainer.state, trainer.slots.control
    is_provisioned = trainer.run.settings.is_provisioned
    resume(trainer, checkpoints, chosen)
    trainer.score_replay()
    lost = checkpoints.count_lost(state.num_steps) if ranks.is_main else {}
    saved = time.monotonic()
    with stop_requested() as stopping, progress(num_rollouts, "train", "rollout") as bar:
        bar.update(int(state.ledger.rollouts["generate"]))
        while True:
            # leave the trunk for a decayed branch, or come back from its end
            if is_end(trainer):
                note(return_to_trunk(trainer, checkpoints), record)
            leave_trunk_if_due(trainer, checkpoints)

            # validate, before the first step and whenever the next point of the curve is due
            note(trainer.validate_if_due(trainer.progress), record)
            before, version = Before(trainer), trainer.learner.version

            # sample and grade
            with state.timed("generate"):
                batch = provision.sample(trainer) if is_provisioned else trainer.sample()
            if batch is None and state.branch is not None:
                note(return_to_trunk(trainer, checkpoints), record)
                continue
            if batch is None:
                break
            due = ranks.is_main and time.monotonic() - saved >= settings.every_seconds
            if due and not is_provisioned:
                keep_in_flight(trainer, checkpoints, batch)

            # update, and give the engine the new weights
            row = learn(trainer, batch)
            if row["updated"]:
                with state.timed("update"):
                    trainer.sync_engine()

            # checkpoint
            stop, due = map(any, zip(*ranks.all_gather((stopping(), due)), strict=True))
            if ranks.is_main:
                checkpoints.journal(before.work(trainer, row))
            if due or stop:
                save(trainer, checkpoints)
                saved = time.monotonic()
            seconds = before.seconds(trainer)
            if state.branch is None:
                values = measurements(row, seconds, control.describe())
                if is_provisioned:
                    values |= provision.measurements(trainer, batch, version)
                record(values, row["step"], row["flops_charged"])
            show(row, sum(seconds.values()), bar, state.branch)
            if stop:
                checkpoints.wait()
                raise KeyboardInterrupt(f"stopped after step {row['step']}, which is checkpointed")
        note(trainer.validate_if_due(trainer.progress, last=True), record)
        save(trainer, checkpoints)
        checkpoints.wait()
    return lost


def learn(trainer: Trainer, batch: Batch) -> dict[str, Any]:
    """Learn from a sampled batch; its row of STEPS."""
    state, slots = trainer.state, trainer.slots

    # replay, select and estimate
    rng, rate = trainer.rng(LEARNING_STREAM), trainer.learning_rate(batch.progress)
    replayed = slots.replay.draw(rng, batch.replayed, trainer.run.settings.batch)
    rollouts = batch.fresh if replayed is None else merge([batch.fresh, replayed])
    with state.timed("score"):
        rollouts = trainer.observe_policy(rollouts)
    estimate = trainer.estimate(rollouts, rng)

    # update
    with state.timed("update"):
        update = trainer.update(rollouts, estimate, rate, rng)

    # observe, charge, record
    trainer.observe(batch.fresh, rollouts)
    charge(trainer, batch, rollouts, estimate, update)
    return trainer.record(batch, rollouts, estimate, update, rate)


class Before:
    """The totals before a step, from which its cost follows."""

    def __init__(self, trainer: Trainer) -> None:
        self.started = time.perf_counter()
        self.executed = trainer.state.trained("executed")
        self.tokens = trainer.state.ledger.tokens["generate"]
        self.parts = dict(trainer.state.seconds)

    def seconds(self, trainer: Trainer) -> dict[str, float]:
        """The step's seconds by part."""
        parts = trainer.state.seconds
        return {part: spent - self.parts.get(part, 0.0) for part, spent in parts.items()}

    def work(self, trainer: Trainer, row: Mapping[str, Any]) -> dict[str, float]:
        """A journal entry: what the step executed."""
        return {
            "step": row["step"],
            "seconds": time.perf_counter() - self.started,
            "flops": trainer.state.trained("executed") - self.executed,
            "tokens": row["tokens"] - self.tokens,
        }


def keep_in_flight(trainer: Trainer, checkpoints: Checkpoints, batch: Batch) -> None:
    """Write the step's rollouts before the update: after a kill they are not sampled again."""
    rows = rollout_rows(trainer.state.num_steps, trainer.prompts.ids, batch.fresh)
    checkpoints.save_in_flight(TRAIN_ROLLOUTS.frame(rows))


def measurements(
    row: Mapping[str, Any], seconds: Mapping[str, float], described: Mapping[str, float]
) -> dict[str, Any]:
    """A step for the record: its row of STEPS, the share of mixed groups, tokens a second, the
    step's own seconds by part, and what control says of itself."""
    parts = {f"seconds/{part}": spent for part, spent in seconds.items() if part != "validate"}
    rates = {
        "mixed_rate": row["num_mixed_groups"] / row["num_prompts"],
        "tokens_per_second": row["completion_tokens_mean"]
        * row["num_rollouts"]
        / max(sum(parts.values()), 1e-9),
    }
    return {
        **row,
        **rates,
        **parts,
        **{f"control/{name}": value for name, value in described.items()},
    }


def show(row: Mapping[str, Any], seconds: float, bar: Any, branch: float | None) -> None:
    """The step on the progress bar, which adds rate and time left. It counts the trunk's rollouts
    alone."""
    bar.update(0 if branch else row["num_rollouts"])
    where = f"branch {branch:g}, " if branch else ""
    tokens = row["completion_tokens_mean"] * row["num_rollouts"] / max(seconds, 1e-9)
    bar.set_postfix_str(
        f"{where}step {row['step']}, reward {row['reward_mean'] or 0:.2f}, "
        f"mixed {row['num_mixed_groups']}/{row['num_prompts']}, {tokens:,.0f} tokens/s, "
        f"{row['flops_charged']:.2g} FLOPs",
        refresh=False,
    )


def note(point: dict[str, Any] | None, record: Record) -> None:
    """Record a new point of the validation curve and log it."""
    if point is None:
        return
    name = "validation_accuracy" if point["branch"] is None else "validation_accuracy_branch"
    record({name: point["accuracy"]}, point["step"], point["flops_charged"])
    logger.info("step %d: validation accuracy %.3f", point["step"], point["accuracy"])


@contextmanager
def stop_requested() -> Iterator[Callable[[], bool]]:
    """Hold back Ctrl-C and SIGTERM until the step is done; a second one ends the run at once."""
    asked: list[int] = []

    def ask(number: int, frame: object) -> None:
        if asked:
            raise KeyboardInterrupt(signal.Signals(number).name)
        asked.append(number)
        logger.warning("finishing the step, then a checkpoint (once more to stop at once)")

    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(asked)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
