"""`train.warm_start`: supervised steps on correct completions, before the first step.

A step minimises the mean negative log-likelihood of its completions' tokens with the run's own
optimizer. The completions are worked solutions of the training prompts, or the correct samples of
the profile (as in RAFT, arXiv 2304.06767), in a random order for each pass over them. The steps are
charged as updates and count in the budget; the schedule of the learning rate begins after them."""

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from transformers import PreTrainedTokenizerBase

from tasks.common.files import ArtifactError
from tasks.models.prompts import encode_plain
from tasks.train.checkpoint.checkpoints import Checkpoints
from tasks.train.data.columns import Ints
from tasks.train.data.profile import Profile
from tasks.train.data.prompts import Prompts
from tasks.train.data.rollouts import Rollouts, make_rollouts
from tasks.train.data.tokens import Gains, Tokens
from tasks.train.loop.buffer import random_numbers
from tasks.train.loop.save import save
from tasks.train.loop.state import TrainingError
from tasks.train.loop.trainer import Trainer
from tasks.train.sampling.collector import RunContext
from tasks.train.settings import CheckpointSettings, WarmStart
from tasks.train.slots import Loss

logger = logging.getLogger(__name__)

STREAM = 3  # index of the warm start's stream of random numbers


@dataclass(frozen=True)
class Demonstrations:
    """Completions to imitate: for each, the row of its prompt among the training prompts, and its
    token ids with the stop token. For example Demonstrations([0, 2], [[11, 2], [7, 7, 2]])."""

    prompt_rows: Ints
    token_ids: list[list[int]]

    def rollouts(self, prompts: Prompts, rows: Ints) -> Rollouts:
        """Return the demonstrations at `rows` as rollouts, each in its own group. They are marked
        as replayed, since no policy sampled them, and their log-probabilities are not used."""
        token_ids, num = [self.token_ids[row] for row in rows.tolist()], len(rows)
        rollouts = make_rollouts(
            self.prompt_rows[rows],
            prompts.token_ids(self.prompt_rows[rows]),
            np.arange(num),
            token_ids=token_ids,
            logprobs=[[0.0] * len(ids) for ids in token_ids],
            versions=[[0] * len(ids) for ids in token_ids],
            reason="stop",
            outcome="correct",
            reward=1.0,
            replayed=True,
        )
        num_tokens = sum(map(len, token_ids))
        return rollouts.estimated(np.ones(num, dtype=np.bool_), np.ones(num_tokens))


class NegativeLogLikelihood(Loss):
    """The loss of a warm start: the mean negative log-likelihood of the step's tokens."""

    normalize = "token"

    def gains(self, tokens: Tokens) -> Gains:
        return tokens.logprobs_N, tokens.logprobs_N.new_zeros(())


def read_demonstrations(
    run: RunContext, prompts: Prompts, profile: Profile, tokenizer: PreTrainedTokenizerBase
) -> Demonstrations | None:
    """Return the completions of the run's warm start that fit `sampling.max_tokens`; None for a run
    without a warm start. Raise ArtifactError if there are none."""
    settings, max_tokens = run.settings.warm_start, run.sampling.max_tokens
    if settings is None:
        return None
    if settings.data == "profile":
        is_correct = (profile.samples["outcome"] == "correct").to_numpy()
        chosen = profile.samples.filter(is_correct)["token_ids"].to_list()
        if not chosen:
            raise ArtifactError(
                "train.warm_start.data is profile, but no sample of the profile is correct among "
                "the prompts of the plan: raise profile.num_samples, use easier prompts, or set "
                "data: solutions"
            )
        return Demonstrations(profile.rows[is_correct], chosen)
    texts = prompts.table["solution"]
    rows = texts.is_not_null().arg_true().to_numpy().astype(np.int64)
    if not len(rows):
        raise ArtifactError(
            "train.warm_start.data is solutions, but no training prompt has a worked solution: "
            "name its field as `solution` in the settings of the source (preset mapping), use a "
            "source that has solutions (gsm8k, math), or set data: profile"
        )
    token_ids = [
        [*encode_plain(text, tokenizer, add_special_tokens=False), int(tokenizer.eos_token_id)]
        for text in texts.drop_nulls()
    ]
    is_short = np.array([len(ids) <= max_tokens for ids in token_ids])
    logger.info("warm start: %d of %d solutions fit sampling.max_tokens", is_short.sum(), len(rows))
    if not is_short.any():
        raise ArtifactError(
            "train.warm_start: every worked solution has more tokens than sampling.max_tokens "
            f"{max_tokens}: raise it, or set data: profile"
        )
    return Demonstrations(rows[is_short], [token_ids[row] for row in np.flatnonzero(is_short)])


def warm_start(
    trainer: Trainer,
    checkpoints: Checkpoints,
    settings: CheckpointSettings,
    is_stopping: Callable[[], bool],
) -> bool:
    """Take the remaining supervised steps of the run, and load the weights into the engine. Return
    False if a stop request cut them short."""
    chosen, state, ranks = trainer.run.settings.warm_start, trainer.state, trainer.run.ranks
    demonstrations = trainer.demonstrations
    if chosen is None or demonstrations is None or state.num_warm_steps == chosen.steps:
        return True
    losses = []
    for step in range(state.num_warm_steps, chosen.steps):
        is_due = checkpoints.seconds_ago() >= settings.every_seconds
        found = ranks.all_gather((is_stopping(), is_due))
        if any(is_stopped for is_stopped, _ in found):
            return False
        if found[0][1] and step:
            save(trainer, checkpoints)
        losses.append(make_step(trainer, demonstrations, chosen))
        if ranks.is_main:
            checkpoints.note_work(state.work)
    with state.timed("update"):
        trainer.sync_engine()
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
        trainer.free_engine()
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
        executed=executed,
        charged=charged,
        charged_mixed=charged,
        charged_paper=charged,
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
