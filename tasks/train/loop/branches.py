"""Decayed branches: what a run with less compute would reach (`train.branches`).

A learning rate that has not decayed yet hides part of the progress, so two runs cannot be compared
halfway. The trunk keeps a constant rate. For the last `decay_share` of each share of the run that
`train.branches` lists, training leaves the trunk and decays the rate; at the end of the share it
validates and returns (Haegele et al., arXiv 2405.18392). A branch's point includes the cost of the
trunk up to the fork and of the decay. The branch's executed work is in the ledger's phase `branch`;
its steps and rollouts are not kept."""

import logging
from collections.abc import Sequence
from typing import Any

from tasks.common.accounting.ledger import ACCOUNTS, Ledger
from tasks.train.checkpoint.checkpoints import Checkpoints
from tasks.train.checkpoint.save import restore, save
from tasks.train.loop.state import ROUNDING
from tasks.train.loop.trainer import Trainer

logger = logging.getLogger(__name__)

TRAINING = ("generate", "score", "update")


def is_end(trainer: Trainer) -> bool:
    """Return whether a branch has made a step and reached its share of the run."""
    state = trainer.state
    if state.branch is None or state.num_steps == state.branch_start:
        return False
    return state.progress >= state.branch - ROUNDING


def leave_trunk_if_due(trainer: Trainer, checkpoints: Checkpoints) -> None:
    """Checkpoint the trunk and begin the next branch, if it is due. Skip branches whose end the
    trunk has already reached."""
    state, settings = trainer.state, trainer.run.settings
    done = state.progress + ROUNDING
    shares = settings.branches[state.branches_done :]
    if state.branch is not None or not shares or state.num_steps == settings.max_steps:
        return
    first = trainer.first_share
    if done < first + (shares[0] - first) * (1.0 - settings.decay_share):
        return
    if done >= shares[0]:
        logger.warning(
            "step %d: the branch to %g of the run is skipped: a step is longer than its decay, or "
            "the profile or the warm start took as much of the budget; raise train.decay_share or "
            "the budget, or lower train.batch.size",
            state.num_steps,
            shares[0],
        )
        state.branches_done += 1
        leave_trunk_if_due(trainer, checkpoints)
        return
    save(trainer, checkpoints)
    checkpoints.wait()
    trainer.run.ranks.barrier()  # the end of the branch restores it
    state.branch, state.branch_start = shares[0], state.num_steps
    logger.info("step %d: a branch decays to %g of the run", state.num_steps, state.branch)


def return_to_trunk(trainer: Trainer, checkpoints: Checkpoints) -> dict[str, Any] | None:
    """Validate at the end of the branch, restore the trunk, and return the branch's point, which is
    added to the trunk's curve. Return None for a branch that `train.max_steps` cut short."""
    state = trainer.state
    point = trainer.validate() if is_end(trainer) else None
    if point is None:
        logger.warning(
            "step %d: train.max_steps ends the branch to %g of the run before its rate has "
            "decayed: it is not measured",
            state.num_steps,
            state.branch,
        )
    for batch in trainer.queue.batches:  # sampled in the branch, but not used for an update
        state.ledger.add("generate", **batch.cost.as_account())
        state.ledger.add("score", executed=batch.cost.judged_flops)
    ledger, seconds = state.ledger, trainer.spent_seconds()
    num_done, work = state.branches_done, state.work
    restore(trainer, checkpoints.trunk())
    trainer.run.ranks.barrier()  # all ranks must read it before the next one is written
    state.branches_done, state.work = num_done + 1, work
    if point is not None:
        state.curve.append(point)
    before = state.ledger
    generated = difference(ledger, before, ("generate",), ("tokens", "rollouts"))
    trained = difference(ledger, before, TRAINING, ACCOUNTS)
    validated = difference(ledger, before, ("evaluate",), (*ACCOUNTS, "tokens", "rollouts"))
    before.add("branch", **generated, **trained)
    for batch in trainer.queue.batches:  # sampled before the fork, so charged to the trunk
        before.add("branch", **{name: -value for name, value in batch.cost.as_account().items()})
        before.add("branch", executed=-batch.cost.judged_flops)
    before.add("evaluate", **validated)
    state.seconds["branch"] += seconds - trainer.spent_seconds()
    save(trainer, checkpoints)
    logger.info("step %d: back on the trunk", state.num_steps)
    return point


def difference(
    after: Ledger, before: Ledger, phases: Sequence[str], names: Sequence[str]
) -> dict[str, float]:
    """Return `after` minus `before`, summed over `phases`, for each account in `names`."""
    return {
        name: sum(getattr(after, name)[phase] - getattr(before, name)[phase] for phase in phases)
        for name in names
    }
