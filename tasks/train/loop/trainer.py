"""The parts of a step: sample, select and estimate, update, charge, validate.

Every random choice of a step comes from (seed, step), so a resumed run repeats exactly what a kill
interrupted.
"""

import logging
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from tasks.common.ledger import ACCOUNTS, charged_flops, paper_training_flops
from tasks.common.statistics import bootstrap_interval
from tasks.train.learner.learner import Gradient, Learner
from tasks.train.learner.update import UpdateStats, learning_rate
from tasks.train.loop.collect import Collector
from tasks.train.loop.record import describe_step, rollout_rows
from tasks.train.loop.state import Run, State, TrainingError
from tasks.train.rollouts import Bools, Floats, GroupRequest, Prompts, Rollouts, merge
from tasks.train.settings import Guards
from tasks.train.slots import Slots

logger = logging.getLogger(__name__)

SAMPLING_STREAM, LEARNING_STREAM, CONTROL_STREAM = 0, 1, 2
PROBE_TOKENS = 8
ROUNDING = 1e-9  # of shares of a run: 0.15 / 0.05 is not quite 3
VALIDATION_DRAWS = 200  # of the bootstrap behind a point's interval


@dataclass(frozen=True)
class Batch:
    """A step's fresh rollouts, and the first request they answer."""

    request: GroupRequest
    fresh: Rollouts


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

    def rng(self, stream: int) -> np.random.Generator:
        """The random numbers of this step and one purpose."""
        return np.random.default_rng([self.run.seed, self.state.num_steps, stream])

    def is_done(self) -> bool:
        """Whether the limit of steps, if there is one, is reached."""
        limit = self.run.settings.max_steps
        return limit is not None and self.state.num_steps >= limit

    def sample(self) -> Batch | None:
        """The step's graded rollouts: control is asked until it has no more requests. None at the
        end of the run."""
        if self.is_done():
            return None
        seeds, choices = self.rng(SAMPLING_STREAM), self.rng(CONTROL_STREAM)
        parts: list[Rollouts] = []
        requests: list[GroupRequest] = []
        while (request := self.slots.control.next(parts, choices)) is not None:
            first_group = sum(len(part.prompt_rows_Q) for part in parts)
            rollouts, cost = self.collector.collect(
                self.prompts, request, seeds, self.state.num_steps, first_group
            )
            self.state.ledger.add(
                "generate", executed=cost.flops, tokens=cost.tokens, rollouts=cost.rollouts
            )
            requests.append(request)
            parts.append(rollouts)
        return Batch(requests[0], merge(parts)) if parts else None

    def estimate(self, rollouts: Rollouts, rng: np.random.Generator) -> tuple[Bools, Floats]:
        """[B] which rollouts enter the loss, and [B] their advantages, 0 for the others."""
        graded_B = ~rollouts.is_error_B()  # our own failures leave their group and every divisor
        keep_B = graded_B.copy()
        keep_B[graded_B] = self.slots.select(rollouts.where(graded_B), rng)
        over_B = keep_B if self.run.settings.advantage_over == "kept" else graded_B
        advantages_B = np.zeros(len(keep_B))
        advantages_B[over_B] = self.slots.advantage(rollouts.where(over_B))
        return keep_B, np.where(keep_B, advantages_B, 0.0)

    def update(
        self, rollouts: Rollouts, keep_B: Bools, advantages_B: Floats, rate: float
    ) -> tuple[Gradient, bool]:
        """One optimizer step, and the engine's new weights; the gradient, and whether it or a
        log-probability was not finite. Nothing moves then, nor where no rollout has a gradient."""
        nothing = Gradient(UpdateStats(), None)
        if not all(np.isfinite(logprobs).all() for logprobs in rollouts.samples.logprobs):
            # a policy that is not finite may not show it in the gradient: no group may be mixed
            self.skip_nonfinite(rollouts)
            return nothing, True
        if not self.learner.has_gradient(keep_B, advantages_B).any():
            return nothing, False
        self.collector.engine.sleep()
        gradient = self.learner.compute_gradient(rollouts, keep_B, advantages_B, self.slots.loss)
        if not gradient.is_finite:
            self.skip_nonfinite(rollouts)
            return Gradient(gradient.stats, None), True
        log_ratios = torch.cat(gradient.stats.log_ratios)
        self.check_sampler(log_ratios, f"step {self.state.num_steps}")
        self.learner.step(rate)
        self.sync_engine()
        return gradient, False

    def sync_engine(self) -> None:
        """Put the policy's weights into the engine, and see that they are there."""
        self.collector.engine.set_weights(self.learner.weights())
        self.probe_engine()

    def learning_rate(self) -> float:
        """The schedule at this step."""
        settings = self.run.settings
        return learning_rate(
            settings.learning_rate,
            settings.final_learning_rate_fraction,
            settings.warmup_steps,
            self.state.num_steps,
            self.slots.control.progress(),
        )

    def observe(self, fresh: Rollouts) -> None:
        """Let the methods that remember learn from the step's fresh rollouts."""
        self.slots.control.observe(fresh)
        self.slots.generate.observe(fresh)
        self.slots.replay.add(fresh)

    def skip_nonfinite(self, rollouts: Rollouts) -> None:
        """Leave the policy as it was. The step's rollouts are in the record, to be replayed with
        --from-rollouts."""
        ids = self.prompts.ids[rollouts.prompt_rows_Q].unique().sort()
        message = (
            f"step {self.state.num_steps}: loss, gradient or log-probabilities are not finite; "
            f"prompts: {', '.join(ids)}"
        )
        limit = self.guards.max_nonfinite_steps
        before = self.state.steps[-limit + 1 :] if limit > 1 else []
        if len(before) == limit - 1 and all(row["nonfinite"] for row in before):
            raise TrainingError(f"{message}; that is guards.max_nonfinite_steps {limit} in a row")
        logger.warning("%s; the step is skipped", message)

    def check_sampler(self, log_ratios: torch.Tensor, where: str) -> None:
        """Raise TrainingError unless sampler and trainer hold the same policy. A sampler with stale
        weights is otherwise silent."""
        gap, engine = float(log_ratios.abs().mean()), self.collector.engine
        if gap > self.max_sampler_gap:
            raise TrainingError(
                f"{where}: the engine {engine.name} {engine.version} and the trainer differ by "
                f"{gap:.2g} in mean |log-probability| at policy version {self.learner.version}, "
                f"over guards.max_sampler_gap {self.max_sampler_gap:g}: it samples from other "
                "weights, or its dtype is coarser than engine.dtype says"
            )

    def probe_engine(self) -> None:
        """Compare a few fresh tokens of the engine with the trainer's log-probabilities. An engine
        that samples from the trainer's own memory cannot be stale."""
        if self.collector.engine.shares_weights:
            return
        rollouts = self.collector.probe(self.prompts, PROBE_TOKENS)
        log_ratios = self.learner.log_ratios(rollouts, self.slots.loss)
        self.check_sampler(log_ratios, f"before step {self.state.num_steps}")

    def charge(
        self,
        fresh: Rollouts,
        rollouts: Rollouts,
        keep_B: Bools,
        advantages_B: Floats,
        stats: UpdateStats,
    ) -> None:
        """Enter the step into the accounts (see the ledger). What was replayed was generated
        before."""
        architecture, ledger = self.run.policy.architecture, self.state.ledger
        generated = float(fresh.tokens_B().sum())
        updated = float(rollouts.tokens_B()[keep_B].sum())
        mixed = float(rollouts.tokens_B()[advantages_B != 0.0].sum())
        has_reference = self.learner.reference is not None
        rollout = charged_flops(architecture, generated=generated)
        reference = charged_flops(architecture, reference=updated) if has_reference else 0.0
        flat = paper_training_flops(architecture, generated, has_reference=has_reference)
        ledger.add(
            "score",
            executed=stats.reference_flops,
            charged=reference,
            charged_mixed=reference,
            charged_paper=reference,
        )
        ledger.add("generate", charged=rollout, charged_mixed=rollout, charged_paper=rollout)
        ledger.add(
            "update",
            executed=stats.flops,
            charged=charged_flops(architecture, updated=updated),
            charged_mixed=charged_flops(architecture, updated=mixed),
            charged_paper=flat - rollout - reference,
            tokens=updated,
            rollouts=int(keep_B.sum()),
        )

    def record(
        self,
        batch: Batch,
        rollouts: Rollouts,
        keep_B: Bools,
        advantages_B: Floats,
        gradient: Gradient,
        numbers: dict[str, Any],
    ) -> dict[str, Any]:
        """Keep the step's rows, and count it; returns its row of STEPS."""
        state = self.state
        row = {
            "step": state.num_steps,
            "pass": batch.request.pass_number,
            "phase": batch.request.phase,
            "grad_norm": gradient.norm,
            "updated": gradient.norm is not None,
            **numbers,
            "tokens": int(state.ledger.tokens["generate"]),
            **{f"flops_{account}": state.trained(account) for account in ACCOUNTS},
            **describe_step(rollouts, keep_B, gradient.stats),
        }
        state.steps.append(row)
        if self.run.ranks.is_main:  # which alone writes them
            state.rollouts += rollout_rows(
                state.num_steps, self.prompts.ids, rollouts, keep_B, advantages_B
            )
        state.num_steps += 1
        return row

    def validate_if_due(self, *, last: bool = False) -> dict[str, Any] | None:
        """Add a point to the curve at the start, when the next share of the run is done, and at the
        end."""
        state, settings = self.state, self.run.settings.validation
        done = self.slots.control.progress()
        is_measured = bool(state.curve) and state.curve[-1]["step"] == state.num_steps
        if is_measured or (done < state.next_validation and not last):
            return None
        num_shares = int(done / settings.every_share + ROUNDING)
        state.next_validation = (num_shares + 1) * settings.every_share - ROUNDING
        with state.timed("validate"):
            rates, cost = self.collector.pass_rates(self.validation, settings.num_samples)
        state.ledger.add(
            "evaluate", executed=cost.flops, tokens=cost.tokens, rollouts=cost.rollouts
        )
        low, high = bootstrap_interval(rates, VALIDATION_DRAWS, np.random.default_rng(0))
        point = {
            "step": state.num_steps,
            "flops_charged": state.trained("charged"),
            "flops_charged_mixed": state.trained("charged_mixed"),
            "flops_executed": state.trained("executed"),
            "rollouts": int(state.ledger.rollouts["generate"]),
            "accuracy": float(rates.mean()),
            "accuracy_low": low,
            "accuracy_high": high,
        }
        state.curve.append(point)
        return point
