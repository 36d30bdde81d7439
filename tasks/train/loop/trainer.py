"""The parts of a step: sample, select and estimate, update, charge, validate.

Every random choice of a step comes from (seed, step), so a resumed run repeats exactly what a kill
interrupted.
"""

import logging
import time
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from tasks.common.ledger import ACCOUNTS, charged_flops
from tasks.common.params import ParamsError
from tasks.common.statistics import bootstrap_interval
from tasks.engines.engine import SwappingEngine
from tasks.train.buffer import flat
from tasks.train.learner.learner import Learner
from tasks.train.learner.micro_batches import minibatches
from tasks.train.learner.update import UpdateStats, learning_rate, merge_stats
from tasks.train.loop.batch import Batch, Start, Update
from tasks.train.loop.collect import Collector, Cost, Place
from tasks.train.loop.record import describe_step, rollout_rows
from tasks.train.loop.state import Run, State, TrainingError
from tasks.train.rollouts import (
    Estimate,
    Features,
    Floats,
    GroupRequest,
    Ints,
    Observed,
    Prompts,
    Rollouts,
    merge,
)
from tasks.train.settings import Guards
from tasks.train.slots import Slots, SoFar

logger = logging.getLogger(__name__)

SAMPLING_STREAM, LEARNING_STREAM, CONTROL_STREAM = 0, 1, 2
PROBE_TOKENS = 8
ROUNDING = 1e-9  # of shares of a run: 0.15 / 0.05 is not quite 3
VALIDATION_DRAWS = 200  # of the bootstrap behind a point's interval


@dataclass
class Trainer:
    """All that a loop works with. Only `learner`, `state` and the slots' states change."""

    run: Run
    slots: Slots
    learner: Learner
    collector: Collector
    prompts: Prompts
    validation: Prompts
    guards: Guards
    max_sampler_gap: float
    state: State

    @property
    def is_ahead(self) -> bool:
        """Whether the engine samples while the policy is updated."""
        return self.run.settings.is_ahead

    @property
    def progress(self) -> float:
        """The share of the run that is done."""
        is_provisioned = self.run.settings.is_provisioned
        return self.state.pool.progress if is_provisioned else self.slots.control.progress()

    def rng(self, stream: int, step: int | None = None) -> np.random.Generator:
        """The random numbers of a step, by default this one, and one purpose."""
        step = self.state.num_steps if step is None else step
        return np.random.default_rng([self.run.seed, step, stream])

    def is_done(self, step: int | None = None) -> bool:
        """Whether the limit of steps, if there is one, is reached; by default at this step."""
        limit, step = self.run.settings.max_steps, self.state.num_steps if step is None else step
        return limit is not None and step >= limit

    def start(self, ahead: int = 0, promised: int = 0) -> Start:
        """What is to be known to sample the step that is `ahead` of this one, from the policy as it
        is now. Replay will have given as much as `promised` to the steps before it."""
        replayed = self.slots.replay.room(self.run.settings.batch, promised)
        return Start(self.state.num_steps + ahead, self.learner.version, replayed)

    def sample(self, start: Start | None = None) -> Batch | None:
        """The graded rollouts of a step, by default this one: control is asked until it has no more
        requests. None at the end of the run. It touches nothing that learning changes."""
        start = start or self.start()
        if self.is_done(start.step):
            return None
        began = time.perf_counter()
        seeds = self.rng(SAMPLING_STREAM, start.step)
        choices = self.rng(CONTROL_STREAM, start.step)
        parts, numbers, costs = list[Rollouts](), list[Ints](), list[Cost]()
        first: GroupRequest | None = None
        fresh: Rollouts | None = None
        while request := self.slots.control.next(SoFar(fresh, len(parts), start.replayed), choices):
            place = self.place(request, fresh, start)
            rollouts, cost = self.collector.collect(self.prompts, request, seeds, place)
            first = first or request
            parts.append(rollouts)
            numbers.append(place.groups)
            costs.append(cost)
            fresh = merge(parts, numbers)
        if fresh is None or first is None:
            return None
        self.collector.check_recorded(start.step, len(fresh.group_B))
        judged, done = self.collector.take_judged(), self.slots.control.progress()
        seconds = time.perf_counter() - began
        return Batch(first, fresh, start.replayed, costs, judged, seconds, done)

    def place(self, request: GroupRequest, fresh: Rollouts | None, start: Start) -> Place:
        """Where `request` stands, after the step's rollouts so far."""
        num_groups = 0 if fresh is None else len(fresh.prompt_rows_Q)
        groups = request.groups(num_groups)
        if fresh is not None:
            known = groups[groups < num_groups]
            if (fresh.prompt_rows_Q[known] != request.prompt_rows[groups < num_groups]).any():
                raise ValueError("a request extends a group of another prompt")
        had_Q = np.bincount([] if fresh is None else fresh.group_B, minlength=groups.max() + 1)
        return Place(start.step, start.version, groups, had_Q[groups])

    def observe_policy(self, rollouts: Rollouts) -> Rollouts:
        """The rollouts with the policy's view of them, where a slot or a second update needs it."""
        slots = self.slots
        wanted = [slot.features for slot in (slots.select, slots.advantage) if slot.features]
        if self.run.settings.updates.is_several:
            wanted.append(Features())
        if not wanted:
            return rollouts
        layers = {features.hidden_layer for features in wanted} - {None}
        if len(layers) > 1:
            raise TrainingError(f"the slots ask for hidden states of several layers: {layers}")
        norms = any(features.gradient_norms for features in wanted)
        if norms and self.learner.is_sharded:
            raise TrainingError(
                "a slot asks for the gradient norm of every rollout, which a rank with a part of "
                "the policy cannot compute by itself: set learner.shard to none"
            )
        features = Features(layers.pop() if layers else None, norms)
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
    ) -> Update:
        """The optimizer steps of a batch. Nothing moves where no rollout has a gradient. A
        log-probability, loss or gradient that is not finite ends them."""
        if not all(np.isfinite(logprobs).all() for logprobs in rollouts.samples.logprobs):
            # a policy that is not finite may not show it in the gradient: no group may be mixed
            self.skip_nonfinite(rollouts, 0)
            return Update(UpdateStats(), [], 1.0, True)
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
        stats, norms, factor, is_finite = [UpdateStats()], list[float](), 1.0, True
        for rows in parts:
            part = rollouts.take(rows)
            gradient = self.learner.compute_gradient(
                part, estimate.take(rollouts, rows), self.slots.loss
            )
            stats.append(gradient.stats)
            is_finite = gradient.is_finite
            if not is_finite:
                self.skip_nonfinite(rollouts, len(norms))
                break
            self.check_sampler(gradient.stats.log_ratios, self.where())
            log_weights_B = torch.cat(gradient.stats.log_weights).double().numpy()
            factor = self.slots.loss.rate_factor(log_weights_B)
            self.learner.step(rate * factor)
            norms.append(gradient.norm or 0.0)
        return Update(merge_stats(stats), norms, factor, not is_finite)

    def make_room(self) -> None:
        """Let the engine free its memory for the learner, unless it is sampling."""
        if not self.is_ahead:
            self.collector.engine.sleep()

    def sync_engine(self) -> None:
        """Put the policy's weights into the engine, and see that they are there."""
        weights, version = self.learner.weights(), self.learner.version
        if self.run.settings.in_flight_updates:
            self.swapping_engine.set_weights(weights, version)
        else:
            self.collector.engine.set_weights(weights)
        self.probe_engine()

    def swap_weights(self) -> None:
        """Put the policy's weights into the engine, which is sampling."""
        self.swapping_engine.swap_weights(self.learner.weights(), self.learner.version)

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
        at its end where its share of the run is."""
        settings = self.run.settings
        if self.state.branch is not None:
            progress = min(progress / self.state.branch, 1.0)
        return learning_rate(
            settings.learning_rate,
            settings.final_learning_rate_fraction,
            settings.decay_share,
            settings.warmup_steps,
            self.state.num_steps,
            progress,
        )

    def observe(self, fresh: Rollouts, rollouts: Rollouts) -> None:
        """Let the methods that remember learn from the step's fresh rollouts, and the advantage
        from all that it was taken of."""
        if not self.is_ahead:
            self.observe_sampled(fresh)
        self.slots.advantage.observe(rollouts)
        self.slots.replay.add(fresh)

    def observe_sampled(self, fresh: Rollouts) -> None:
        """Let those that decide what is sampled learn from a step's fresh rollouts. They must not
        be sampling."""
        self.slots.control.observe(fresh)
        self.slots.generate.observe(fresh)

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
        update: Update,
        rate: float,
    ) -> dict[str, Any]:
        """Keep the step's rows, and count it; returns its row of STEPS."""
        state = self.state
        row = {
            "step": state.num_steps,
            "pass": batch.request.pass_number,
            "phase": batch.request.phase,
            "grad_norm": float(np.mean(update.norms)) if update.norms else None,
            "updated": bool(update.norms),
            "num_updates": len(update.norms),
            "learning_rate": rate * update.rate_factor,
            "nonfinite": update.nonfinite,
            "tokens": int(state.ledger.tokens["generate"]),
            **{f"flops_{account}": state.trained(account) for account in ACCOUNTS},
            **describe_step(rollouts, estimate.keep_B, update.stats, len(update.norms)),
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

    def validate_if_due(self, done: float, *, last: bool = False) -> dict[str, Any] | None:
        """Add a point to the curve at the start, when the next share of the run is `done`, and at
        the end."""
        state, every_share = self.state, self.run.settings.validation.every_share
        trunk = [point["step"] for point in state.curve if point["branch"] is None]
        is_measured = trunk[-1:] == [state.num_steps]
        if is_measured or state.branch or (done < state.next_validation and not last):
            return None
        num_shares = int(done / every_share + ROUNDING)
        state.next_validation = (num_shares + 1) * every_share - ROUNDING
        point = self.validate()
        state.curve.append(point)
        return point

    def validate(self) -> dict[str, Any]:
        """The policy's point of the curve."""
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
    is_current_B = ~rollouts.replayed_B & (rollouts.versions_B == version)
    wanted_N = rollouts.trained_N() & is_current_B[rollouts.owner_N()]
    return torch.from_numpy((old_N - sampler_N)[wanted_N])
