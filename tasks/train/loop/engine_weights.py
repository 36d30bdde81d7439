"""The engine's copy of the policy: loading its weights, verifying them, and freeing memory."""

import numpy as np
import torch

from tasks.train.data.prompts import Prompts
from tasks.train.data.rollouts import Rollouts
from tasks.train.learner.learner import Learner
from tasks.train.loop.state import State, TrainingError
from tasks.train.sampling.collector import Collector
from tasks.train.slots import Loss

PROBE_TOKENS = 8  # four times as many in 16 bits, whose rounding varies more
ROUNDINGS = 4.0  # in 16 bits, how often the policy's own rounding engine and trainer may differ
ROUNDED = 8  # rollouts on which this rounding is measured, and prompts of a second probe


class EngineWeights:
    """Loads the policy's weights into the engine. `version` is that of the weights in the engine;
    -1: those of the policy's folder. The engine and the trainer may differ by `max_gap` in mean
    |log-probability|, or in 16 bits by ROUNDINGS times the rounding of the policy itself in
    `dtype`, the coarser dtype of the two: deep policies round more. `parts_beside` are the parts of
    a step that run during updates."""

    parts_beside: tuple[str, ...] = ()

    def __init__(
        self,
        learner: Learner,
        collector: Collector,
        prompts: Prompts,
        loss: Loss,
        state: State,
        max_gap: float,
        dtype: str,
    ) -> None:
        self.learner, self.collector, self.prompts = learner, collector, prompts
        self.loss, self.state, self.max_gap, self.dtype = loss, state, max_gap, dtype
        self.limit, self.version = max_gap, -1  # the limit is that of this policy

    def load(self) -> None:
        """Load the policy's weights into the engine, which is idle, and verify them."""
        self.send()
        self.note_loaded()
        self.probe()

    def send(self) -> None:
        """Copy the policy's weights into the engine."""
        self.collector.engine.set_weights(self.learner.weights())

    def note_loaded(self) -> None:
        """Note that the engine has the policy's weights."""
        self.version = self.learner.version
        self.learner.proximal.keep(self.version)

    def catch_up(self) -> None:
        """Load the newest weights into the idle engine, unless it has them."""
        if self.version != self.learner.version:
            with self.state.timed("update"):
                self.load()

    def free(self) -> None:
        """Free the engine's memory for the learner."""
        self.collector.engine.sleep()

    def check(self, log_ratios: list[torch.Tensor], rollouts: Rollouts, where: str) -> None:
        """Raise TrainingError if the mean absolute difference of log-probabilities in `log_ratios`,
        those of tokens of `rollouts`, is over the limit. A sampler with stale weights would
        otherwise go unnoticed."""
        ratios, engine = torch.cat(log_ratios), self.collector.engine
        gap = float(ratios.abs().mean()) if len(ratios) else 0.0
        if gap > self.limit and self.dtype != "float32":
            few = rollouts.take(np.arange(min(len(rollouts.group_B), ROUNDED)))
            rounding = self.learner.rounding(few, self.loss, self.dtype)
            self.limit = max(self.max_gap, ROUNDINGS * rounding)
        if gap > self.limit:
            raise TrainingError(
                f"{where}: the engine {engine.name} {engine.version} and the trainer differ by "
                f"{gap:.2g} in mean |log-probability| at policy version {self.learner.version}, "
                f"over guards.max_sampler_gap {self.limit:.2g}: it samples from other "
                "weights, or its dtype is coarser than engine.dtype"
            )

    def check_before_validation(self) -> None:
        """Verify weights that `load` did not verify: here none."""

    def probe(self) -> None:
        """Compare the engine's log-probabilities of a few new tokens with the trainer's, on every
        rank. In 16 bits one completion can differ by chance: above `max_gap`, more prompts decide.
        (A resumed run has no higher limit.) The cost counts only as executed. An engine that
        samples from the trainer's own memory is not probed: it cannot be stale."""
        if self.collector.engine.shares_weights:
            return
        num_tokens = PROBE_TOKENS if self.dtype == "float32" else 4 * PROBE_TOKENS
        for num_prompts in (1,) if self.dtype == "float32" else (1, ROUNDED):
            rollouts, cost = self.collector.probe(self.prompts, num_prompts, num_tokens)
            log_ratios, flops = self.learner.log_ratios(rollouts, self.loss)
            is_over = bool(log_ratios.abs().mean() > self.max_gap)
            probes = self.learner.ranks.all_gather((cost.flops, flops, is_over))
            for sampled, scored, _ in probes:
                self.state.ledger.add("generate", executed=sampled)
                self.state.ledger.add("score", executed=scored)
            if not any(over for *_, over in probes):
                break
        self.check([log_ratios], rollouts, f"before step {self.state.num_steps}")
