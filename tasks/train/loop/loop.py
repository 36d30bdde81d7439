"""The training loop, top to bottom.

    [warm start]
    control -> GroupQueue -> [request, sample, grade] -> Batch
      -> select, estimate, update -> weights -> engine
      -> observe: control, generate, advantage, replay

A window is the set of steps during which the engine keeps its weights: one step, or several if
batches are sampled ahead (`loop.ahead`). Between windows the policy is validated, a branch begins
or ends (`branches`), and a checkpoint is written."""

import logging
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tasks.common.accounting.spending import GENERATED
from tasks.common.files import ArtifactError
from tasks.common.progress import progress
from tasks.train.checkpoint.checkpoints import Checkpoints
from tasks.train.checkpoint.save import resume, save
from tasks.train.data.rollouts import Rollouts, merge
from tasks.train.loop.branches import is_end, leave_trunk_if_due, return_to_trunk
from tasks.train.loop.charge import charge, costs_of
from tasks.train.loop.parts import sampler_of
from tasks.train.loop.queue import Batch
from tasks.train.loop.reporter import UNKNOWN, Length, Log, Reporter
from tasks.train.loop.sampler import Sampler
from tasks.train.loop.trainer import Trainer
from tasks.train.settings import CheckpointSettings
from tasks.train.warm_start import warm_start

logger = logging.getLogger(__name__)


def train(
    trainer: Trainer,
    checkpoints: Checkpoints,
    settings: CheckpointSettings,
    log: Log,
    length: Length = UNKNOWN,
    checkpoint: Path | None = None,
) -> dict[str, float]:
    """Train to the end of the run, from the given `checkpoint` or the newest one. Return the work
    lost to kills ({} on ranks above 0). `log(values, step, charged FLOPs)` is called for every
    trunk step and every curve point; the progress bar reads `length`. Raise KeyboardInterrupt
    (Ctrl-C, SIGTERM) after in-flight batches are used or saved."""
    ranks, state = trainer.run.ranks, trainer.state
    resume(trainer, checkpoints, checkpoint)
    trainer.score_replay()
    lost = checkpoints.count_lost(state.work) if ranks.is_main else {}
    with (
        stop_requested() as stopping,
        progress(length.amount, "train", length.unit) as bar,
        sampler_of(trainer) as sampler,
    ):
        reporter = Reporter(trainer, sampler, checkpoints, log, bar)
        is_stopped = not warm_start(trainer, checkpoints, settings, stopping)
        while not is_stopped:
            # leave the trunk for a decayed branch, or return from its end
            if is_end(trainer):
                sampler.rest()
                reporter.note(return_to_trunk(trainer, checkpoints))
            leave_trunk_if_due(trainer, checkpoints)

            # validate, before the first step and whenever the next point of the curve is due
            if not trainer.is_measured and state.progress >= state.next_validation:
                sampler.rest()
                reporter.note(trainer.add_point(state.progress))

            # request, sample and grade; a checkpoint, if due, keeps the sampling
            reporter.begin_window()
            sampler.fill()
            is_late = checkpoints.seconds_ago() >= settings.every_seconds
            if ranks.all_gather(trainer.queue.num_complete and is_late)[0]:
                save(trainer, checkpoints)
            if not (batches := sampler.take(state.branch)):
                if state.branch is None:
                    break
                reporter.note(return_to_trunk(trainer, checkpoints))
                continue
            state.progress = batches[-1].progress

            # select, estimate, update and observe
            learn_window(trainer, batches, sampler, reporter)

            is_stopped = any(ranks.all_gather(stopping()))
        sampler.rest()
        if not is_stopped and not trainer.is_measured:
            reporter.note(trainer.add_point(state.progress))
        save(trainer, checkpoints)
        checkpoints.wait()
    if is_stopped:
        raise KeyboardInterrupt(f"stopped after {state.latest_step()}, which is checkpointed")
    return lost


def learn_window(
    trainer: Trainer, batches: Sequence[Batch], sampler: Sampler, reporter: Reporter
) -> None:
    """Train on the batches of a window, then let the control observe them. The sampler decides when
    the engine gets the new weights."""
    for batch in batches:
        reporter.begin_step()
        row = learn(trainer, batch)
        if row["updated"]:
            sampler.hand_over()
        reporter.end_step(batch, row)

    sampler.end_window()
    reporter.end_window()


def learn(trainer: Trainer, batch: Batch) -> dict[str, Any]:
    """Train on a batch, and return its row of STEPS."""
    state, slots, settings = trainer.state, trainer.slots, trainer.run.settings
    trainer.learner.proximal.forget(check_versions(trainer, batch.fresh))

    # replay, select and estimate
    rng = trainer.rng()
    replayed = slots.replay.draw(rng, batch.num_replayed, settings.batch)
    with state.timed("score"):
        rollouts = trainer.joined(batch.fresh, batch.joined)
        rollouts = rollouts if replayed is None else merge([rollouts, replayed])
        rollouts = trainer.scored(rollouts)
    rollouts = trainer.estimate(rollouts, rng)

    # update, with the learning rate at the progress of the run after this step
    if (budget := trainer.budget) is not None:
        judged = 0.0 if budget.cell.account in GENERATED else batch.cost.judged_flops
        costs = costs_of(trainer, rollouts, budget.cell.account)
        budget.add_step(judged + sum(costs.values()), batch.target)
        state.progress = batch.progress = budget.share
    rate = trainer.learning_rate(batch.progress) * slots.control.rate_factor()
    with state.timed("update"):
        update = trainer.update(rollouts, rate, rng)

    # observe, charge, record
    slots.advantage.observe(rollouts)
    for shape in slots.shape:
        shape.observe(rollouts)
    slots.replay.add(batch.fresh)
    charge(trainer, rollouts, batch.cost, update)
    row = trainer.add_row(batch, rollouts, update, rate)
    trainer.learner.reset_reference(state.num_steps)
    return row


def check_versions(trainer: Trainer, fresh: Rollouts) -> int:
    """Return the oldest version that a fresh token may have. Raise ArtifactError if a token's
    version is older, or newer than the trainer's policy."""
    newest = trainer.learner.version
    oldest = trainer.queue.oldest_version(newest, trainer.state.steps)
    versions = fresh.versions_N()
    wrong = versions[(versions > newest) | (versions < oldest)]
    if len(wrong):
        raise ArtifactError(
            f"{trainer.where()}: tokens are of the policy after {wrong[0]} updates, but only those "
            f"of {oldest} to {newest} are allowed"
        )
    return oldest


@contextmanager
def stop_requested() -> Iterator[Callable[[], bool]]:
    """Yield a function that returns whether Ctrl-C or SIGTERM has requested a stop after the step.
    A second signal stops at once."""
    signals: list[int] = []

    def on_signal(number: int, frame: object) -> None:
        if signals:
            raise KeyboardInterrupt(signal.Signals(number).name)
        signals.append(number)
        logger.warning("finishing the step, then writing a checkpoint (repeat to stop at once)")

    before = {
        number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)
    }
    try:
        yield lambda: bool(signals)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
