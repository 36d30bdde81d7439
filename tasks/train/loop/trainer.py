"""The loop: ask control, generate, grade, select, estimate, update, observe; count the cost;
measure on validation.

On-policy, one update a step. Every random choice of a step comes from (seed, step), so a resumed
run repeats exactly what a kill interrupted. Left out: more than one update a step, asynchronous
sampling."""

import logging
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from tasks.common.ledger import ACCOUNTS, Ledger, charged_flops, paper_training_flops
from tasks.common.statistics import bootstrap_interval
from tasks.engines.engine import Sampling
from tasks.models.policy import Policy, named_weights
from tasks.train.learner.micro_batches import micro_batches
from tasks.train.learner.update import (
    Objective,
    UpdateStats,
    accumulate_gradients,
    learning_rate,
    merge_stats,
)
from tasks.train.loop.collect import Collector
from tasks.train.loop.record import describe_step, rollout_rows
from tasks.train.rollouts import Bools, Floats, Ints, Prompts, Request, Rollouts, StepTotals, merge
from tasks.train.settings import TrainSettings
from tasks.train.slots import Slots

logger = logging.getLogger(__name__)


SAMPLING_STREAM, LEARNING_STREAM, CONTROL_STREAM = 0, 1, 2


class TrainingError(RuntimeError):
    """Training cannot go on; the message says at which step and why."""


@dataclass(frozen=True)
class Update:
    """What an update did: sums over its tokens, and the gradient's norm before clipping, None
    without a step."""

    stats: UpdateStats
    grad_norm: float | None
    nonfinite: bool


class Trainer:
    """All that changes while a policy trains; `run.py` drives, saves and restores it."""

    def __init__(
        self,
        policy: Policy,
        model: PreTrainedModel,
        reference: PreTrainedModel | None,
        collector: Collector,
        prompts: Prompts,
        validation: Prompts,
        plan: dict[str, Ints],
        settings: TrainSettings,
        slots: Slots,
        sampling: Sampling,
        seed: int,
    ) -> None:
        self.policy, self.model, self.collector = policy, model, collector
        self.prompts, self.validation, self.settings, self.slots = (
            prompts,
            validation,
            settings,
            slots,
        )
        self.sampling, self.seed = sampling, seed
        self.objective = Objective(
            slots.loss,
            sampling.temperature,
            reference,
            settings.kl_coefficient,
            settings.share_prompts,
            settings.tokens_per_logprob_chunk,
        )
        self.optimizer = torch.optim.AdamW(
            model.parameters(),
            lr=settings.learning_rate,
            betas=(settings.betas[0], settings.betas[1]),
            weight_decay=settings.weight_decay,
            fused=True,
        )
        self.control = slots.start_control(plan, settings.batch)
        self.replay = slots.start_replay()
        self.num_steps, self.next_validation = 0, 0.0
        self.ledger = Ledger()
        self.seconds: dict[str, float] = defaultdict(float)
        self.steps: list[dict[str, Any]] = []
        self.curve: list[dict[str, Any]] = []
        self.rollouts: list[dict[str, Any]] = []

    def learn(self, request: Request, fresh: Rollouts) -> dict[str, Any]:
        """The rest of a step, from its rollouts: replay, select, estimate, update, observe; its row
        of STEPS."""
        rng, rate = (
            np.random.default_rng([self.seed, self.num_steps, LEARNING_STREAM]),
            self.learning_rate(),
        )
        replayed = self.slots.replay.draw(self.replay, rng)
        rollouts = fresh if replayed is None else merge([fresh, replayed])
        keep_B, advantages_B = self.estimate(rollouts, rng)
        with self.timed("update"):
            update = self.update(rollouts, keep_B, advantages_B, rate)
        self.slots.control.observe(self.control, fresh)
        self.slots.generate.observe(self.collector.generation, fresh)
        self.slots.replay.add(self.replay, fresh)
        self.charge(fresh, rollouts, keep_B, update.stats)
        totals = {f"flops_{account}": self.trained(account) for account in ACCOUNTS}
        row = {
            "step": self.num_steps,
            "pass": request.pass_number,
            "phase": request.phase,
            "learning_rate": rate,
            "grad_norm": update.grad_norm,
            "updated": update.grad_norm is not None,
            "nonfinite": update.nonfinite,
            "tokens": int(self.ledger.tokens["generate"]),
            **totals,
            **describe_step(rollouts, keep_B, update.stats),
        }
        self.steps.append(row)
        self.rollouts += rollout_rows(
            self.num_steps, self.prompts.ids, rollouts, keep_B, advantages_B
        )
        self.num_steps += 1
        return row

    def estimate(self, rollouts: Rollouts, rng: np.random.Generator) -> tuple[Bools, Floats]:
        """[B] which rollouts enter the loss, and [B] their advantages, 0 for the others."""
        graded_B = (
            ~rollouts.is_error_B()
        )  # our own failures leave their group and every denominator
        keep_B = graded_B.copy()
        keep_B[graded_B] = self.slots.select(
            rollouts.rewards_B[graded_B], rollouts.group_B[graded_B], rng
        )
        over_B = keep_B if self.settings.advantage_over == "kept" else graded_B
        advantages_B = np.zeros(len(keep_B))
        advantages_B[over_B] = self.slots.advantage(
            rollouts.rewards_B[over_B], rollouts.group_B[over_B]
        )
        return keep_B, np.where(keep_B, advantages_B, 0.0)

    def sample(self) -> tuple[Request, Rollouts] | None:
        """The step's rollouts: what control asks for until it is content, graded. None at the end
        of the plan."""
        rng, choice = (
            np.random.default_rng([self.seed, self.num_steps, stream])
            for stream in (SAMPLING_STREAM, CONTROL_STREAM)
        )
        parts: list[Rollouts] = []
        requests: list[Request] = []
        with self.timed("generate"):
            while (request := self.slots.control.next(self.control, parts, choice)) is not None:
                first_group = sum(len(part.prompt_rows_Q) for part in parts)
                rollouts, cost = self.collector.collect(
                    self.prompts, request, rng, self.num_steps, first_group
                )
                self.ledger.add(
                    "generate", executed=cost.flops, tokens=cost.tokens, rollouts=cost.rollouts
                )
                requests.append(request)
                parts.append(rollouts)
        return (requests[0], merge(parts)) if parts else None

    def update(
        self, rollouts: Rollouts, keep_B: Bools, advantages_B: Floats, rate: float
    ) -> Update:
        """One optimizer step on the kept rollouts. Those with advantage 0 have no gradient (without
        a KL term) and are not computed, but they count in the loss's denominators; a step with no
        other makes no optimizer step at all."""
        if not all(np.isfinite(logprobs).all() for logprobs in rollouts.samples.logprobs):
            self.skip_nonfinite(
                rollouts
            )  # a policy that is not finite may not show it in the gradient: none is mixed
            return Update(UpdateStats(), None, True)
        computed_B = keep_B if self.objective.reference else keep_B & (advantages_B != 0.0)
        if not computed_B.any():
            return Update(UpdateStats(), None, False)
        ranks = self.collector.ranks
        mine = np.isin(
            rollouts.group_B, ranks.share(np.unique(rollouts.group_B[computed_B]).tolist())
        )
        rows = np.flatnonzero(computed_B & mine)
        tokens_B, settings = rollouts.completion_tokens_B(), self.settings
        totals = StepTotals(
            int(tokens_B[keep_B].sum()), int(keep_B.sum()), self.sampling.max_tokens
        )
        by_group, device = settings.share_prompts, self.model.device
        batches = micro_batches(
            rollouts, rows, settings.max_tokens_per_micro_batch, device, by_group=by_group
        )
        self.collector.engine.sleep()
        self.optimizer.zero_grad(set_to_none=True)
        self.model.train(
            settings.activation_checkpointing
        )  # in evaluation mode transformers keeps all activations
        with torch.autocast(device.type, torch.bfloat16, enabled=settings.dtype == "bfloat16"):
            stats = accumulate_gradients(
                self.model, batches, advantages_B, self.objective, totals, self.policy.architecture
            )
        self.model.eval()
        stats = merge_stats(ranks.everyone(stats))
        ranks.sum_gradients(self.model)
        grad_norm = float(
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), settings.max_grad_norm)
        )
        if not np.isfinite(grad_norm) or not np.isfinite(stats.loss):
            self.skip_nonfinite(rollouts)
            return Update(stats, None, True)
        self.check_sampler(stats)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)  # the engine may need their memory
        self.sync_engine()
        return Update(stats, grad_norm, False)

    def skip_nonfinite(self, rollouts: Rollouts) -> None:
        """Leave the policy as it was. The step's rollouts are in the record, to be replayed with
        --from-rollouts."""
        ids = sorted({self.prompts.ids[row] for row in rollouts.prompt_rows_Q})
        message = (
            f"step {self.num_steps}: loss, gradient or log-probabilities are not finite; prompts: "
            f"{', '.join(ids)}"
        )
        limit = self.settings.max_nonfinite_steps
        before = self.steps[-limit + 1 :] if limit > 1 else []
        if len(before) == limit - 1 and all(row["nonfinite"] for row in before):
            raise TrainingError(f"{message}; that is train.max_nonfinite_steps {limit} in a row")
        logger.warning("%s; the step is skipped", message)

    def sync_engine(self) -> None:
        """Put the policy's weights into the engine."""
        self.collector.engine.set_weights(named_weights(self.model))

    def is_done(self) -> bool:
        """Whether the limit of steps, if there is one, is reached."""
        return self.settings.max_steps is not None and self.num_steps >= self.settings.max_steps

    def num_rollouts(self) -> int | None:
        """The rollouts the whole run is planned to take, for the progress bar."""
        return int(self.control["group_size"].sum()) if "group_size" in self.control else None

    def check_sampler(self, stats: UpdateStats) -> None:
        """Sampler and trainer must hold the same policy. A sampler with stale weights is otherwise
        silent."""
        gap = float(torch.cat(stats.log_ratios).abs().mean())
        if gap > self.settings.max_sampler_gap:
            raise TrainingError(
                f"step {self.num_steps}: sampler and trainer differ by {gap:.4f} in mean "
                "|log-probability|, over "
                f"train.max_sampler_gap {self.settings.max_sampler_gap}: the engine samples from "
                "other weights, or its "
                "dtype is too coarse"
            )

    def learning_rate(self) -> float:
        """The schedule at this step."""
        settings = self.settings
        done = self.slots.control.progress(self.control)
        return learning_rate(
            settings.learning_rate,
            settings.final_learning_rate_rate,
            settings.warmup_steps,
            self.num_steps,
            done,
        )

    def charge(
        self, fresh: Rollouts, rollouts: Rollouts, keep_B: Bools, stats: UpdateStats
    ) -> None:
        """Enter the step into the three accounts (see the ledger). What was replayed was generated
        before."""
        architecture = self.policy.architecture
        generated, updated = float(fresh.tokens_B().sum()), float(rollouts.tokens_B()[keep_B].sum())
        rollout = charged_flops(architecture, generated=generated)
        has_reference = self.objective.reference is not None
        reference = charged_flops(architecture, reference=updated) if has_reference else 0.0
        flat = paper_training_flops(architecture, generated, has_reference=has_reference)
        self.ledger.add(
            "score", executed=stats.reference_flops, charged=reference, charged_paper=reference
        )
        self.ledger.add("generate", charged=rollout, charged_paper=rollout)
        self.ledger.add(
            "update",
            executed=stats.flops,
            charged=charged_flops(architecture, updated=updated),
            charged_paper=flat - rollout - reference,
            tokens=updated,
            rollouts=int(keep_B.sum()),
        )

    def trained(self, account: str) -> float:
        """FLOPs of training so far in one account: generation, scoring and update, not
        validation."""
        phases = getattr(self.ledger, account)
        return float(phases["generate"] + phases["score"] + phases["update"])

    def validate_if_due(self, *, last: bool = False) -> dict[str, Any] | None:
        """Add a point to the curve when the next interval of charged FLOPs is reached, and at the
        end."""
        done = self.trained("charged")
        if (self.curve and self.curve[-1]["step"] == self.num_steps) or (
            done < self.next_validation and not last
        ):
            return None
        self.next_validation = (
            done // self.settings.validation.every_flops + 1
        ) * self.settings.validation.every_flops
        with self.timed("validate"):
            rates, cost = self.collector.pass_rates(
                self.validation, self.settings.validation.num_samples
            )
        self.ledger.add("evaluate", executed=cost.flops, tokens=cost.tokens, rollouts=cost.rollouts)
        low, high = bootstrap_interval(rates, 200, np.random.default_rng(0))
        point = {
            "step": self.num_steps,
            "flops_charged": done,
            "flops_executed": self.trained("executed"),
            "rollouts": int(self.ledger.rollouts["generate"]),
            "accuracy": float(rates.mean()),
            "accuracy_low": low,
            "accuracy_high": high,
        }
        self.curve.append(point)
        return point

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Add the seconds of the block to `part`."""
        started = time.perf_counter()
        yield
        self.seconds[part] += time.perf_counter() - started
