"""The parts of a step: score, estimate, update, add its rows, validate."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import polars as pl
import torch

from tasks.common.accounting.ledger import ACCOUNTS
from tasks.common.accounting.spending import pass_cost
from tasks.common.artifacts import STEPS
from tasks.common.statistics import bootstrap_interval
from tasks.train.data.columns import nested
from tasks.train.data.demonstrations import Demonstrations
from tasks.train.data.noise import noise_of
from tasks.train.data.prompts import Prompts
from tasks.train.data.rollouts import Features, Observed, Rollouts
from tasks.train.learner.learner import Learner
from tasks.train.learner.micro_batches import minibatches
from tasks.train.learner.update import UpdateStats, learning_rate, merge_stats
from tasks.train.loop.budget import RunBudget
from tasks.train.loop.engine_weights import EngineWeights
from tasks.train.loop.estimate import estimate
from tasks.train.loop.queue import LEARNING_STREAM, Batch, GroupQueue, random_numbers
from tasks.train.loop.rows import describe_step, rollout_rows
from tasks.train.loop.state import ROUNDING, State, TrainingError
from tasks.train.sampling.collector import Collector, RunContext, validation_rollouts
from tasks.train.settings import Guards
from tasks.train.slots import Slots

logger = logging.getLogger(__name__)

VALIDATION_DRAWS = 200  # of the bootstrap behind a point's interval


@dataclass
class Trainer:
    """Parts of the loop. Only `learner`, `state`, `queue`, `budget`, `slots`, `weights` change."""

    run: RunContext
    slots: Slots
    learner: Learner
    collector: Collector
    queue: GroupQueue
    prompts: Prompts
    validation: Prompts
    guards: Guards
    weights: EngineWeights
    state: State
    budget: RunBudget | None = None  # without one, the run ends with its plan
    demonstrations: Demonstrations | None = None  # of a warm start

    def spent_seconds(self, *left_out: str) -> float:
        """Return the seconds of all parts except `left_out`, and those that run during updates."""
        apart = {*left_out, *self.weights.parts_beside}
        return sum(spent for part, spent in self.state.seconds.items() if part not in apart)

    @property
    def first_share(self) -> float:
        """The share of the run that is done before the first step."""
        return 0.0 if self.budget is None else self.budget.first_share

    def rng(self) -> np.random.Generator:
        """Return the random number generator for this step's update."""
        return random_numbers(self.run.seed, self.state.num_steps, LEARNING_STREAM)

    def features(self) -> Features | None:
        """Return all features of the policy that the slots, a second update or M2PO need before the
        step's update; None if there are none."""
        slots = self.slots
        by_slot = [slots.select.features, slots.advantage.features]
        by_slot += [shape.features for shape in slots.shape]
        requested = [features for features in by_slot if features]
        if self.run.settings.reads_policy:
            requested.append(Features())
        if not requested:
            return None
        layers = {features.hidden_layer for features in requested} - {None}
        if len(layers) > 1:
            raise TrainingError(f"the slots need hidden states of several layers: {layers}")
        norms = any(features.gradient_norms for features in requested)
        if norms and self.learner.is_sharded:
            raise TrainingError(
                "a slot needs the gradient norm of every rollout, which a rank cannot compute from "
                "its part of the policy: set learner.shard to none"
            )
        return Features(layers.pop() if layers else None, norms)

    def scored(self, rollouts: Rollouts) -> Rollouts:
        """Add two things to the rollouts: the policy's features, if a part of the step needs them;
        and the old policy's log-probabilities, unless the old policy is the present one."""
        features = self.features()
        if features is not None:
            rollouts = replace(rollouts, observed=self.score(rollouts, features))
        old_N, settings = None, self.run.settings
        if settings.correction.proximal is not None:
            self.weights.free()
            old_N, flops = self.learner.score_old(rollouts, self.slots.loss)
            self.charge_pass(rollouts, flops, Features())
        elif settings.scores_old and rollouts.observed is not None:
            old_N = rollouts.observed.logprobs_N
        if old_N is None:
            return rollouts
        return rollouts.with_columns(old_logprobs=nested(old_N, rollouts.completion_tokens_B()))

    def score_replay(self) -> None:
        """Let the replay compute missing log-probabilities of the initial policy's rollouts. After
        the first step none is missing, even after a resume."""
        with self.state.timed("score"):
            self.slots.replay.prepare(self.score_stored)
        if self.budget is not None:  # before the first step
            self.budget.spend(self.budget.passes)
            self.budget.passes = 0.0

    def score_stored(self, rollouts: Rollouts) -> Observed:
        """Return the policy's view of stored rollouts, and charge it as scoring and to the budget's
        next step."""
        if (budget := self.budget) is not None:
            architecture = self.run.policy.architecture
            budget.passes += pass_cost(budget.cell.account, architecture, rollouts.rows())
        return self.score(rollouts, Features())

    def joined(self, fresh: Rollouts, groups: Sequence[int]) -> Rollouts:
        """Return `fresh`, and the stored rollouts that join these of its groups. A pass over stored
        rollouts is a part of the step's cost."""
        if not groups:
            return fresh
        numbers = np.array(groups)
        stored = self.slots.replay.join(fresh.prompt_rows_Q[numbers], self.score_stored)
        joining = stored.with_columns(group=numbers[stored.group_B])
        table = pl.concat([fresh.table, joining.table], rechunk=True)
        return Rollouts(table.sort("group", maintain_order=True), fresh.prompt_rows_Q)

    def score(self, rollouts: Rollouts, features: Features) -> Observed:
        """Return the policy's view of the rollouts, and charge it as scoring."""
        self.weights.free()
        observed, flops = self.learner.score(rollouts, features, self.slots.loss)
        self.charge_pass(rollouts, flops, features)
        return observed

    def charge_pass(self, rollouts: Rollouts, flops: float, features: Features) -> None:
        """Charge a pass that supplied `features` as scoring; `flops` were executed."""
        charged = self.learner.score_cost("charged", rollouts.rows(), features)
        self.state.ledger.add("score", **{**dict.fromkeys(ACCOUNTS, charged), "executed": flops})

    def estimate(self, rollouts: Rollouts, rng: np.random.Generator) -> Rollouts:
        """Return the rollouts with their advantages and selection."""
        max_tokens = self.run.sampling.max_tokens
        return estimate(rollouts, self.slots, self.run.settings, max_tokens, rng)

    def update(self, rollouts: Rollouts, rate: float, rng: np.random.Generator) -> UpdateStats:
        """Take a batch's optimizer steps, none if no rollout has a gradient; return their
        statistics. Stop at a non-finite log-probability, loss or gradient, or at rate factor 0."""
        if not np.isfinite(rollouts.logprobs_N).all():
            # without a mixed group, the gradient would not show a non-finite policy
            self.skip_nonfinite(rollouts, 0)
            return UpdateStats(num_nonfinite=1)
        updates, loss, control = self.run.settings.updates, self.slots.loss, self.slots.control
        done = [UpdateStats()]
        if self.learner.has_gradient(rollouts, loss).any():
            self.weights.free()
            if updates.epochs > 1:
                rollouts, done[0].reference_flops = self.learner.score_reference(rollouts, loss)
        parts = minibatches(rollouts, updates, rng)
        old_N = rollouts.old_logprobs_N
        if old_N is not None and not self.learner.proximal.is_mean:
            # for current tokens these are the present policy's log-probabilities
            current_N = rollouts.trained_N() & rollouts.is_current_N(self.learner.version)
            ratios = torch.from_numpy((old_N - rollouts.logprobs_N)[current_N])
            self.weights.check([ratios], rollouts, self.where())
        for number, part in enumerate(parts):
            if not self.learner.has_gradient(part, loss).any():
                continue
            stats = self.learner.compute_gradient(
                *(part, loss),
                cuts_rows=self.slots.cuts_rows,
                drops_cut=self.slots.drops_cut,
                with_noise=control.reads_noise,
            )
            done.append(stats)
            if stats.num_nonfinite:
                stats.norms = []  # no optimizer step follows
                self.skip_nonfinite(rollouts, len(done) - 2)
                break
            self.weights.check(stats.log_ratios, part, self.where())
            log_weights_B = torch.cat(stats.log_weights).double().numpy()
            reuse = number * updates.epochs // len(parts)
            stats.rate_factors = [loss.rate_factor(log_weights_B, stats.norms[0], reuse)]
            if not stats.rate_factors[0]:  # of the dropped gradient only the FLOPs count
                done[-1] = UpdateStats(flops=stats.flops, reference_flops=stats.reference_flops)
                break
            loss.observe_entropy(stats.entropy / max(stats.num_tokens, 1))
            for noise in stats.noise:
                control.observe_noise(noise)
            self.learner.step(rate * stats.rate_factors[0])
        if control.reads_noise and len(done) == 1:  # no group has a gradient
            control.observe_noise(noise_of(2, 0.0, 0.0))
        merged = merge_stats(done)
        self.learner.proximal.observe(merged.active_share)
        return merged

    def learning_rate(self, progress: float) -> float:
        """Return the learning rate of this step, after which a share `progress` of the run is done.
        On a branch, the schedule ends at the branch's share of the run. It does not include the
        part of a budget that was spent before the first step."""
        first, last = self.first_share, self.state.branch or 1.0
        trained = min((progress - first) / (last - first), 1.0)
        return learning_rate(self.run.settings, self.state.num_steps, trained)

    def skip_nonfinite(self, rollouts: Rollouts, num_updates: int) -> None:
        """Log a non-finite step; its first `num_updates` updates stay. Raise TrainingError after
        `guards.max_nonfinite_steps` such steps in a row."""
        ids = self.prompts.ids[rollouts.prompt_rows_Q].unique().sort()
        message = (
            f"{self.where()}: loss, gradient or log-probabilities are not finite; "
            f"prompts: {', '.join(ids)}"
        )
        limit = self.guards.max_nonfinite_steps
        before = self.state.steps[-limit + 1 :] if limit > 1 else []
        if len(before) == limit - 1 and all(row["nonfinite"] for row in before):
            raise TrainingError(f"{message}; {limit} steps in a row (guards.max_nonfinite_steps)")
        skipped = (
            f"the step ends after {num_updates} updates" if num_updates else "the step is skipped"
        )
        logger.warning("%s; %s", message, skipped)

    def where(self) -> str:
        return f"step {self.state.num_steps}"

    def add_row(
        self, batch: Batch, rollouts: Rollouts, update: UpdateStats, rate: float
    ) -> dict[str, Any]:
        """Store the step's rows, count the step, and return its row of STEPS."""
        state = self.state
        row = {
            **dict.fromkeys(STEPS.columns),
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
            **describe_step(rollouts, update),
        }
        state.steps.append(row)
        if self.run.ranks.is_main:  # only rank 0 writes them
            state.rollouts.append(rollout_rows(state.num_steps, self.prompts.ids, rollouts))
        state.num_steps += 1
        return row

    @property
    def is_measured(self) -> bool:
        """Whether the curve has a point at this step, or a branch is running, which adds one."""
        trunk = [point["step"] for point in self.state.curve if point["branch"] is None]
        return self.state.branch is not None or trunk[-1:] == [self.state.num_steps]

    def add_point(self, done: float) -> dict[str, Any]:
        """Validate the policy, add the result to the curve, and return it."""
        every_share = self.run.settings.validation.every_share
        num_shares = int(done / every_share + ROUNDING)
        self.state.next_validation = (num_shares + 1) * every_share - ROUNDING
        self.state.curve.append(self.validate())
        return self.state.curve[-1]

    @cached_property
    def unsampled(self) -> Rollouts:
        """The rollouts of a validation, still without tokens."""
        return validation_rollouts(self.validation, self.run.settings.validation.num_samples)

    def validate(self) -> dict[str, Any]:
        """Validate the policy, and return its point of the curve."""
        self.weights.check_before_validation()
        state = self.state
        with state.timed("validate"):
            rates, cost = self.collector.pass_rates(self.validation, self.unsampled)
        account = {**cost.as_account(), "executed": cost.flops + cost.judged_flops}
        state.ledger.add("evaluate", **account)
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
