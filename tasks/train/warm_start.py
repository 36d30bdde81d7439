"""`train.warm_start`: supervised steps on correct completions, before the first step.

A step minimises the mean negative log-likelihood of its completions' tokens with the run's own
optimizer. The completions are worked solutions of the training prompts, or the correct samples of
the profile (as in RAFT, arXiv 2304.06767), in a random order for each pass over them. The steps are
charged as updates and count in the budget; the schedule of the learning rate begins after them."""

import logging
import time
from collections.abc import Callable

import numpy as np

from tasks.common.accounting.ledger import ACCOUNTS
from tasks.train.checkpoint.checkpoints import Checkpoints
from tasks.train.checkpoint.save import save
from tasks.train.data.columns import Ints
from tasks.train.data.demonstrations import Demonstrations
from tasks.train.data.rollouts import Rollouts
from tasks.train.data.tokens import Gains, Tokens
from tasks.train.loop.queue import random_numbers
from tasks.train.loop.state import TrainingError
from tasks.train.loop.trainer import Trainer
from tasks.train.settings import CheckpointSettings, WarmStart
from tasks.train.slots import Loss

logger = logging.getLogger(__name__)

STREAM = 3  # index of the warm start's stream of random numbers


class NegativeLogLikelihood(Loss):
    """The loss of a warm start: the mean negative log-likelihood of the step's tokens."""

    normalize = "token"

    def gains(self, tokens: Tokens) -> Gains:
        return tokens.logprobs_N, tokens.logprobs_N.new_zeros(())


def warm_start(
    trainer: Trainer,
    checkpoints: Checkpoints,
    settings: CheckpointSettings,
    is_stopping: Callable[[], bool],
) -> bool:
    """Take the remaining supervised steps of the run, and load the weights into the engine. Return
    False if a stop request cut them short."""
    steps, state, ranks = trainer.run.settings.warm_start, trainer.state, trainer.run.ranks
    demonstrations = trainer.demonstrations
    if steps is None or demonstrations is None or state.num_warm_steps == steps.steps:
        return True
    losses = []
    for step in range(state.num_warm_steps, steps.steps):
        is_due = checkpoints.seconds_ago() >= settings.every_seconds
        signals = ranks.all_gather((is_stopping(), is_due))
        if any(is_stopped for is_stopped, _ in signals):
            return False
        if signals[0][1] and step:
            save(trainer, checkpoints)
        losses.append(make_step(trainer, demonstrations, steps))
        if ranks.is_main:
            checkpoints.note_work(state.work)
    with state.timed("update"):
        trainer.weights.load()
    state.progress = trainer.first_share
    words = "warm start: %d steps on %d completions, loss %.3f -> %.3f"
    logger.info(words, len(losses), len(demonstrations.token_ids), losses[0], losses[-1])
    return True


def make_step(trainer: Trainer, demonstrations: Demonstrations, settings: WarmStart) -> float:
    """Take one supervised step, and enter it into the accounts; return its loss. Raise
    TrainingError if the loss or gradient is not finite, or if the budget is spent."""
    state, learner, began = trainer.state, trainer.learner, time.perf_counter()
    num, seed = len(demonstrations.token_ids), trainer.run.seed
    rows = batch_rows(num, settings, seed, state.num_warm_steps)
    rollouts = demonstrations.rollouts(trainer.prompts, rows)
    with state.timed("update"):
        trainer.weights.free()
        stats = learner.compute_gradient(rollouts, NegativeLogLikelihood())
        if stats.num_nonfinite:
            raise TrainingError(
                f"train.warm_start: loss or gradient of step {state.num_warm_steps} is not finite: "
                "lower train.warm_start.learning_rate"
            )
        learner.step(settings.learning_rate or trainer.run.settings.learning_rate)
    state.num_warm_steps += 1
    charge(trainer, rollouts, stats.flops)
    state.work["seconds"] += time.perf_counter() - began
    state.work["flops"] += stats.flops
    return stats.loss


def batch_rows(num: int, settings: WarmStart, seed: int, step: int) -> Ints:
    """Return which of `num` demonstrations a step uses, by row: the next ones in a random order,
    drawn for each pass. The choice depends only on the arguments, so a resumed run repeats it."""
    places = np.arange(step * settings.batch_size, (step + 1) * settings.batch_size)
    passes = {number: random_numbers(seed, number, STREAM) for number in np.unique(places // num)}
    orders = {number: rng.permutation(num) for number, rng in passes.items()}
    return np.array([orders[place // num][place % num] for place in places])


def charge(trainer: Trainer, rollouts: Rollouts, executed: float) -> None:
    """Add a supervised step's cost (`executed`: FLOPs run) to the ledger and the spent budget.
    Raise TrainingError if the budget is then spent."""
    learner, budget, rows = trainer.learner, trainer.budget, rollouts.rows()
    charged = learner.update_cost("charged", rows)
    trainer.state.ledger.add(
        "update",
        **{**dict.fromkeys(ACCOUNTS, charged), "executed": executed},
        tokens=rows.num_tokens,
        rollouts=len(rows.group_B),
    )
    if budget is None:
        return
    budget.spend_before(learner.update_cost(budget.cell.account, rows))
    if budget.spent >= budget.cell.amount:
        raise TrainingError(
            f"train.warm_start spends experiment.budget by step {trainer.state.num_warm_steps} and "
            "leaves nothing to train with: lower train.warm_start.steps, or raise the amount"
        )
