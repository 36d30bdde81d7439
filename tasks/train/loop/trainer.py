"""The parts of a step: select and estimate, update, validate, record."""

import logging
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from tasks.common.ledger import ACCOUNTS, charged_flops
from tasks.common.params import ParamsError
from tasks.common.spending import pass_cost
from tasks.common.statistics import bootstrap_interval
from tasks.engines.engine import SwappingEngine
from tasks.train.context import RunContext
from tasks.train.learner.learner import Learner
from tasks.train.learner.micro_batches import minibatches
from tasks.train.learner.update import UpdateStats, learning_rate, merge_stats
from tasks.train.loop.buffer import LEARNING_STREAM, Batch, RolloutBuffer, random_numbers
from tasks.train.loop.record import describe_step, rollout_rows
from tasks.train.loop.state import ROUNDING, State, TrainingError
from tasks.train.rollouts import (
    Estimate,
    Features,
    Floats,
    Observed,
    Prompts,
    Rollouts,
    flat,
)
from tasks.train.sampling.collector import Collector
from tasks.train.settings import Guards
from tasks.train.slots import Slots

logger = logging.getLogger(__name__)

PROBE_TOKENS = 8
VALIDATION_DRAWS = 200  # of the bootstrap behind a point's interval


@dataclass
class Trainer:
    """All that a loop works with. Only `learner`, `state`, `buffer` and the slots' states
    change."""

    run: RunContext
    slots: Slots
    learner: Learner
    collector: Collector
    buffer: RolloutBuffer
    prompts: Prompts
    validation: Prompts
    guards: Guards
    max_sampler_gap: float
    state: State
    engine_version: int = -1  # of the weights that the engine has; -1: those of the policy's folder

    def spent_seconds(self, *left_out: str) -> float:
        """The seconds of all parts but those `left_out`. Sampling ahead takes no time but what is
        waited for it."""
        apart = {*left_out, "generate"} if self.run.settings.num_ahead else {*left_out}
        return sum(spent for part, spent in self.state.seconds.items() if part not in apart)

    def is_done(self) -> bool:
        """Whether the limit of steps, if there is one, is reached."""
        limit = self.run.settings.max_steps
        return limit is not None and self.state.num_steps >= limit

    def rng(self) -> np.random.Generator:
        """The random numbers with which this step is learned from."""
        return random_numbers(self.run.seed, self.state.num_steps, LEARNING_STREAM)

    @property
    def num_observing_passes(self) -> float:
        """What `observe_policy` takes, in forwards over the step's rollouts."""
        features = self.features()
        return 0.0 if features is None else 1.0 + 2.0 * features.gradient_norms

    def features(self) -> Features | None:
        """What a slot or a second update needs to see of the policy before the step's update."""
        slots = self.slots
        wanted = [slot.features for slot in (slots.select, slots.advantage) if slot.features]
        if self.run.settings.updates.is_several:
            wanted.append(Features())
        if not wanted:
            return None
        layers = {features.hidden_layer for features in wanted} - {None}
        if len(layers) > 1:
            raise TrainingError(f"the slots ask for hidden states of several layers: {layers}")
        norms = any(features.gradient_norms for features in wanted)
        if norms and self.learner.is_sharded:
            raise TrainingError(
                "a slot asks for the gradient norm of every rollout, which a rank with a part of "
                "the policy cannot compute by itself: set learner.shard to none"
            )
        return Features(layers.pop() if layers else None, norms)

    def observe_policy(self, rollouts: Rollouts) -> Rollouts:
        """The rollouts with the policy's view of them, where a slot or a second update needs it."""
        features = self.features()
        if features is None:
            return rollouts
        return replace(rollouts, observed=self.look(rollouts, features))

    def score_replay(self) -> None:
        """Compute the log-probabilities of what replay holds of the initial policy without any.
        After the first step it has them, from here or from a checkpoint."""
        rollouts = self.slots.replay.unscored()
        if rollouts is None:
            return
        with self.state.timed("score"):
            logprobs_N = self.look(rollouts, Features()).logprobs_N
        self.slots.replay.score(logprobs_N)
        if (spending := self.buffer.spending) is not None:
            architecture = self.run.policy.architecture
            spending.spent += pass_cost(spending.budget.account, architecture, rollouts.rows())
        logger.info("scored %d rollouts of the profile", len(rollouts.group_B))

    def look(self, rollouts: Rollouts, features: Features) -> Observed:
        """The policy's view of the rollouts, charged as scoring."""
        self.make_room()
        observed, flops = self.learner.observe(rollouts, features, self.slots.loss)
        tokens = float(rollouts.tokens_B().sum())
        backward = 2.0 * features.gradient_norms  # beside the forward, in units of it
        charged = charged_flops(self.run.policy.architecture, reference=tokens) * (1.0 + backward)
        self.state.ledger.add(
            "score", executed=flops, charged=charged, charged_mixed=charged, charged_paper=charged
        )
        return observed

    def estimate(self, rollouts: Rollouts, rng: np.random.Generator) -> Estimate:
        """Which rollouts enter the loss, and the advantages of their tokens."""
        graded_B = ~rollouts.is_error_B()  # our own failures leave their group and every divisor
        keep_B = graded_B.copy()
        keep_B[graded_B] = self.slots.select(rollouts.where(graded_B), rng)
        over_B = keep_B if self.run.settings.advantage_over == "kept" else graded_B
        over = rollouts.where(over_B)
        advantages = self.slots.advantage(over)
        # of rollouts or of tokens
        if len(advantages) == len(over.group_B):
            advantages = advantages[over.owner_N()]
        owner_N = rollouts.owner_N()
        advantages_N = np.zeros(len(owner_N))
        advantages_N[over_B[owner_N]] = advantages
        learned_N = keep_B[owner_N] & rollouts.trained_N()
        several = self.run.settings.updates.is_several
        old_N = rollouts.observed.logprobs_N if several and rollouts.observed else None
        estimate = Estimate(keep_B, np.where(learned_N, advantages_N, 0.0), old_N)
        if self.slots.advantage.skips_zeros:
            return replace(estimate, keep_B=keep_B & estimate.has_advantage_B(rollouts))
        return estimate

    def update(
        self, rollouts: Rollouts, estimate: Estimate, rate: float, rng: np.random.Generator
    ) -> UpdateStats:
        """The optimizer steps of a batch. Nothing moves where no rollout has a gradient. A
        log-probability, loss or gradient that is not finite ends them."""
        if not all(np.isfinite(logprobs).all() for logprobs in rollouts.samples.logprobs):
            # a policy that is not finite may not show it in the gradient: no group may be mixed
            self.skip_nonfinite(rollouts, 0)
            return UpdateStats(num_nonfinite=1)
        parts = [
            rows
            for rows in minibatches(rollouts.group_B, self.run.settings.updates, rng)
            if self.learner.has_gradient(rollouts.take(rows), estimate.take(rollouts, rows)).any()
        ]
        if parts:
            self.make_room()
        if estimate.old_N is not None:  # the only pass at which all fresh rollouts are current
            ratios = fresh_log_ratios(rollouts, estimate.old_N, self.learner.version)
            self.check_sampler([ratios], self.where())
        done = [UpdateStats()]
        for rows in parts:
            stats = self.learner.compute_gradient(
                rollouts.take(rows), estimate.take(rollouts, rows), self.slots.loss
            )
            done.append(stats)
            if stats.num_nonfinite:
                stats.norms = []  # no step is made of it
                self.skip_nonfinite(rollouts, len(done) - 2)
                break
            self.check_sampler(stats.log_ratios, self.where())
            log_weights_B = torch.cat(stats.log_weights).double().numpy()
            stats.rate_factors = [self.slots.loss.rate_factor(log_weights_B)]
            self.learner.step(rate * stats.rate_factors[0])
        return merge_stats(done)

    def make_room(self) -> None:
        """Let the engine free its memory for the learner, unless it is sampling."""
        if not self.run.settings.num_ahead:
            self.collector.engine.sleep()

    def sync_engine(self) -> None:
        """Put the policy's weights into the engine, and see that they are there."""
        weights, version = self.learner.weights(), self.learner.version
        if self.run.settings.in_flight_updates:
            self.swapping_engine.set_weights(weights, version)
        else:
            self.collector.engine.set_weights(weights)
        self.engine_version = version
        self.probe_engine()

    def swap_weights(self) -> None:
        """Put the policy's weights into the engine, which is sampling."""
        self.swapping_engine.swap_weights(self.learner.weights(), self.learner.version)
        self.engine_version = self.learner.version

    @property
    def swapping_engine(self) -> SwappingEngine:
        """The engine. Raises ParamsError for one that cannot take weights while it samples."""
        engine = self.collector.engine
        if not isinstance(engine, SwappingEngine):
            raise ParamsError(
                f"train.in_flight_updates is true, and the engine {engine.name} cannot take "
                "weights while it samples: set engine.name to server, or in_flight_updates to false"
            )
        return engine

    def learning_rate(self, progress: float) -> float:
        """The schedule at this step, with which a share `progress` of the run is done; a branch is
        at its end where its share of the run is. What the profile took of a budget is not part of
        the schedule."""
        first, last = self.buffer.first_share, self.state.branch or 1.0
        trained = min((progress - first) / (last - first), 1.0)
        return learning_rate(self.run.settings, self.state.num_steps, trained)

    def skip_nonfinite(self, rollouts: Rollouts, num_updates: int) -> None:
        """Leave the policy as the step's updates so far made it. The step's rollouts are in the
        record, to be replayed with --from-rollouts."""
        ids = self.prompts.ids[rollouts.prompt_rows_Q].unique().sort()
        message = (
            f"{self.where()}: loss, gradient or log-probabilities are not finite; "
            f"prompts: {', '.join(ids)}"
        )
        limit = self.guards.max_nonfinite_steps
        before = self.state.steps[-limit + 1 :] if limit > 1 else []
        if len(before) == limit - 1 and all(row["nonfinite"] for row in before):
            raise TrainingError(f"{message}; that is guards.max_nonfinite_steps {limit} in a row")
        skipped = (
            f"the step ends after {num_updates} updates" if num_updates else "the step is skipped"
        )
        logger.warning("%s; %s", message, skipped)

    def where(self) -> str:
        """The step, for messages."""
        return f"step {self.state.num_steps}"

    def check_sampler(self, log_ratios: list[torch.Tensor], where: str) -> None:
        """Raise TrainingError unless sampler and trainer hold the same policy. A sampler with stale
        weights is otherwise silent."""
        ratios, engine = torch.cat(log_ratios), self.collector.engine
        gap = float(ratios.abs().mean()) if len(ratios) else 0.0
        if gap > self.max_sampler_gap:
            raise TrainingError(
                f"{where}: the engine {engine.name} {engine.version} and the trainer differ by "
                f"{gap:.2g} in mean |log-probability| at policy version {self.learner.version}, "
                f"over guards.max_sampler_gap {self.max_sampler_gap:g}: it samples from other "
                "weights, or its dtype is coarser than engine.dtype says"
            )

    def probe_engine(self) -> None:
        """Compare a few fresh tokens of the engine with the trainer's log-probabilities, on every
        rank; no method is charged for it. An engine that samples from the trainer's own memory
        cannot be stale."""
        if self.collector.engine.shares_weights:
            return
        rollouts, cost = self.collector.probe(self.prompts, PROBE_TOKENS)
        log_ratios, flops = self.learner.log_ratios(rollouts, self.slots.loss)
        self.check_sampler([log_ratios], f"before step {self.state.num_steps}")
        for sampled, scored in self.run.ranks.all_gather((cost.flops, flops)):
            self.state.ledger.add("generate", executed=sampled)
            self.state.ledger.add("score", executed=scored)

    def record(
        self,
        batch: Batch,
        rollouts: Rollouts,
        estimate: Estimate,
        update: UpdateStats,
        rate: float,
    ) -> dict[str, Any]:
        """Keep the step's rows, and count it; returns its row of STEPS."""
        state = self.state
        row = {
            "step": state.num_steps,
            "pass": batch.pass_number,
            "phase": batch.phase,
            "grad_norm": float(np.mean(update.norms)) if update.norms else None,
            "updated": bool(update.norms),
            "num_updates": len(update.norms),
            "learning_rate": rate * ([1.0, *update.rate_factors][-1]),
            "nonfinite": bool(update.num_nonfinite),
            "tokens": int(state.ledger.tokens["generate"]),
            **{f"flops_{account}": state.trained(account) for account in ACCOUNTS},
            **describe_step(rollouts, estimate.keep_B, update),
        }
        state.steps.append(row)
        if self.run.ranks.is_main:  # which alone writes them
            state.rollouts += rollout_rows(
                state.num_steps,
                self.prompts.ids,
                rollouts,
                estimate.keep_B,
                estimate.mean_B(rollouts),
            )
        state.num_steps += 1
        return row

    @property
    def is_measured(self) -> bool:
        """Whether the curve has a point of this step, or a branch is trained, which has but one."""
        trunk = [point["step"] for point in self.state.curve if point["branch"] is None]
        return self.state.branch is not None or trunk[-1:] == [self.state.num_steps]

    def is_point_due(self, done: float) -> bool:
        """Whether the curve is due for a point: at the start, and when the next share of the run is
        `done`."""
        return not self.is_measured and done >= self.state.next_validation

    def add_point(self, done: float) -> dict[str, Any]:
        """Add a point to the curve."""
        every_share = self.run.settings.validation.every_share
        num_shares = int(done / every_share + ROUNDING)
        self.state.next_validation = (num_shares + 1) * every_share - ROUNDING
        self.state.curve.append(self.validate())
        return self.state.curve[-1]

    def validate(self) -> dict[str, Any]:
        """The policy's point of the curve."""
        if self.run.settings.in_flight_updates:  # the engine was not probed while it sampled
            self.probe_engine()
        state, settings = self.state, self.run.settings.validation
        with state.timed("validate"):
            rates, cost = self.collector.pass_rates(self.validation, settings.num_samples)
        executed = cost.flops + self.collector.take_judged()
        state.ledger.add("evaluate", executed=executed, tokens=cost.tokens, rollouts=cost.rollouts)
        low, high = bootstrap_interval(rates, VALIDATION_DRAWS, np.random.default_rng(0))
        return {
            "step": state.num_steps,
            "flops_charged": state.trained("charged"),
            "flops_charged_mixed": state.trained("charged_mixed"),
            "flops_executed": state.trained("executed"),
            "rollouts": int(state.ledger.rollouts["generate"]),
            "accuracy": float(rates.mean()),
            "accuracy_low": low,
            "accuracy_high": high,
            "branch": state.branch,
        }


def fresh_log_ratios(rollouts: Rollouts, old_N: Floats, version: int) -> torch.Tensor:
    """The log-probabilities before the update less the sampler's, of the own tokens of fresh
    rollouts that were sampled with the run's settings from this version of the policy."""
    sampler_N = flat(rollouts.samples.logprobs, np.float64)
    wanted_N = rollouts.trained_N() & rollouts.is_current_N(version)
    return torch.from_numpy((old_N - sampler_N)[wanted_N])
