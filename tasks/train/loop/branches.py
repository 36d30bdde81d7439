"""Decayed branches: what a run of a share of the compute would have reached (`train.branches`).

A learning rate that has not decayed yet hides what was learned, so two runs are not comparable in
their middle. The trunk stays at a constant rate; where `decay_share` of a listed share of the run
is left, training leaves it, decays to that share's end, measures, and goes back (Haegele et al.,
arXiv 2405.18392). A branch's point carries the cost of the trunk up to the fork and of its own
decay. What it executed stands in the ledger's phase `branch`; its steps and rollouts are not kept.

A branch is checkpointed like the trunk, whose last checkpoint is kept meanwhile: a kill in the
middle of a branch loses no more than elsewhere."""

import logging
from collections.abc import Sequence
from typing import Any

from tasks.common.ledger import ACCOUNTS, Ledger
from tasks.train.checkpoint.checkpoints import Checkpoints
from tasks.train.loop.save import restore, save
from tasks.train.loop.state import ROUNDING
from tasks.train.loop.trainer import Trainer

logger = logging.getLogger(__name__)

TRAINING = ("generate", "score", "update")


def is_end(trainer: Trainer) -> bool:
    """Whether the branch has made a step and reached its share of the run."""
    state = trainer.state
    if state.branch is None or state.num_steps == state.branch_start:
        return False
    return trainer.buffer.progress >= state.branch - ROUNDING


def leave_trunk_if_due(trainer: Trainer, checkpoints: Checkpoints) -> None:
    """Where the next branch leaves the trunk, checkpoint the trunk, and begin. A branch
    whose end the trunk has passed in one step is left out."""
    state, settings = trainer.state, trainer.run.settings
    done = trainer.buffer.progress + ROUNDING
    shares = settings.branches[state.branches_done :]
    is_waiting = state.branch is None and bool(shares) and not trainer.is_done()
    if not is_waiting:
        return
    first = trainer.buffer.first_share
    if done < first + (shares[0] - first) * (1.0 - settings.decay_share):
        return
    if done >= shares[0]:
        logger.warning(
            "step %d: the branch to %g of the run is left out: a step is longer than its decay, or "
            "the profile took as much of the budget; raise train.decay_share or the budget, or "
            "lower train.batch.size",
            state.num_steps,
            shares[0],
        )
        state.branches_done += 1
        leave_trunk_if_due(trainer, checkpoints)
        return
    save(trainer, checkpoints)
    checkpoints.wait()
    trainer.run.ranks.barrier()  # the branch must find it when it comes back
    state.branch, state.branch_start = shares[0], state.num_steps
    logger.info("step %d: a branch decays to %g of the run", state.num_steps, state.branch)


def return_to_trunk(trainer: Trainer, checkpoints: Checkpoints) -> dict[str, Any] | None:
    """Measure the end of the branch, go back to where it left the trunk, and return its point of
    the curve, which the trunk keeps; None for a branch that `train.max_steps` cut short."""
    state = trainer.state
    point = trainer.validate() if is_end(trainer) else None
    if point is None:
        logger.warning(
            "step %d: train.max_steps ends the branch to %g of the run before its rate has "
            "decayed: it is not measured",
            state.num_steps,
            state.branch,
        )
    for batch in trainer.buffer.batches:  # sampled in the branch, and not learned from
        state.ledger.add("generate", **batch.cost.as_account())
        state.ledger.add("score", executed=batch.judged_flops)
    ledger, seconds = state.ledger, trainer.spent_seconds()
    num_done, work = state.branches_done, state.work
    restore(trainer, checkpoints.trunk())
    trainer.run.ranks.barrier()  # all have read it before the next one is written
    state.branches_done, state.work = num_done + 1, work
    if point is not None:
        state.curve.append(point)
    before = state.ledger
    generated = difference(ledger, before, ("generate",), ("tokens", "rollouts"))
    trained = difference(ledger, before, TRAINING, ACCOUNTS)
    validated = difference(ledger, before, ("evaluate",), (*ACCOUNTS, "tokens", "rollouts"))
    before.add("branch", **generated, **trained)
    for batch in trainer.buffer.batches:  # sampled before the fork: the trunk is charged for it
        before.add("branch", **{name: -value for name, value in batch.cost.as_account().items()})
        before.add("branch", executed=-batch.judged_flops)
    before.add("evaluate", **validated)
    state.seconds["branch"] += seconds - trainer.spent_seconds()
    save(trainer, checkpoints)
    logger.info("step %d: back on the trunk", state.num_steps)
    return point


def difference(
    after: Ledger, before: Ledger, phases: Sequence[str], names: Sequence[str]
) -> dict[str, float]:
    """What `after` has more than `before` in these phases, by account."""
    return {
        name: sum(getattr(after, name)[phase] - getattr(before, name)[phase] for phase in phases)
        for name in names
    }
