"""Reports during a run: metrics (MLflow), the file of executed work, the progress bar."""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from tasks.train.checkpoint.checkpoints import Checkpoints
from tasks.train.loop.queue import Batch
from tasks.train.loop.sampler import Sampler
from tasks.train.loop.trainer import Trainer

logger = logging.getLogger(__name__)

Log = Callable[[Mapping[str, Any], int, float], None]


@dataclass(frozen=True)
class Length:
    """The length of a run, for the progress bar."""

    amount: float | None  # None if it is unknown
    unit: str = "rollout"


UNKNOWN = Length(None)


class Reporter:
    """Reports every step, every window and every point of the curve."""

    def __init__(
        self,
        trainer: Trainer,
        sampler: Sampler,
        checkpoints: Checkpoints,
        log: Log,
        bar: Any,
    ) -> None:
        self.trainer, self.sampler, self.checkpoints = trainer, sampler, checkpoints
        self.log, self.bar = log, bar
        self.values: list[dict[str, Any]] = []  # of each step of the window
        self.shown = 0.0  # on the bar

    def note(self, point: dict[str, Any] | None) -> None:
        """Record a new point of the validation curve and log it."""
        if point is None:
            return
        name = "validation_accuracy" if point["branch"] is None else "validation_accuracy_branch"
        self.log({name: point["accuracy"]}, point["step"], point["flops_charged"])
        logger.info("step %d: validation accuracy %.3f", point["step"], point["accuracy"])

    def begin_window(self) -> None:
        """Store the time at the start of a window."""
        self.window_began = time.perf_counter()

    def begin_step(self) -> None:
        """Store the totals before a step, to compute its cost later."""
        state = self.trainer.state
        self.step_began, self.parts = time.perf_counter(), dict(state.seconds)
        self.executed, self.tokens = state.trained("executed"), state.ledger.tokens["generate"]

    def end_step(self, batch: Batch, row: dict[str, Any]) -> None:
        """Count the step's work, except sampling that a checkpoint contains, and store its row."""
        state, work = self.trainer.state, self.trainer.state.work
        work["seconds"] += time.perf_counter() - self.step_began + batch.seconds
        work["flops"] += state.trained("executed") - self.executed
        work["tokens"] += row["tokens"] - self.tokens
        if batch.is_kept:  # in a checkpoint: a kill does not lose it
            work["seconds"] -= batch.seconds
            work["flops"] -= batch.cost.flops + batch.cost.judged_flops
            work["tokens"] -= batch.cost.tokens
        if self.trainer.run.ranks.is_main:
            self.checkpoints.note_work(work)
        parts = {part: spent - self.parts.get(part, 0.0) for part, spent in state.seconds.items()}
        seconds = {**parts, "generate": batch.seconds}
        self.values.append(measurements(row, seconds))

    def end_window(self) -> None:
        """Record the trunk's steps of the window, with the sampler's values after it."""
        state, num = self.trainer.state, len(self.values)
        seconds = max(time.perf_counter() - self.window_began, 1e-9)
        self.sampler.describe(self.values, seconds)
        if self.trainer.slots.loss.entropy.target is not None:
            self.values[-1]["entropy_coefficient"] = self.trainer.slots.loss.bonus()
        for measured in self.values:
            if state.branch is None:
                self.log(measured, measured["step"], measured["flops_charged"])
            self.show(measured, seconds / num)
        self.values = []

    def show(self, row: Mapping[str, Any], seconds: float) -> None:
        """Show the step on the progress bar, which adds rate and time left. The bar advances only
        on the trunk: by its rollouts or, with a budget, by the amount spent."""
        state, budget, branch = self.trainer.state, self.trainer.budget, self.trainer.state.branch
        done = state.ledger.rollouts["generate"] if budget is None else budget.spent
        if branch is None:
            self.bar.update(done - self.shown)
            self.shown = done
        where = f"branch {branch:g}, " if branch else ""
        tokens = row["completion_tokens_mean"] * row["num_rollouts"] / max(seconds, 1e-9)
        self.bar.set_postfix_str(
            f"{where}step {row['step']}, reward {row['reward_mean'] or 0:.2f}, "
            f"mixed {row['num_mixed_groups']}/{row['num_prompts']}, {tokens:,.0f} tokens/s, "
            f"{row['flops_charged']:.2g} FLOPs charged",
            refresh=False,
        )


def measurements(row: Mapping[str, Any], seconds: Mapping[str, float]) -> dict[str, Any]:
    """Return a step for the record: its row of STEPS, the share of mixed groups, tokens per second,
    and the step's own seconds by part."""
    parts = {f"seconds/{part}": spent for part, spent in seconds.items() if part != "validate"}
    tokens = row["completion_tokens_mean"] * row["num_rollouts"]
    return {
        **row,
        "mixed_rate": row["num_mixed_groups"] / row["num_prompts"],
        "tokens_per_second": tokens / max(sum(parts.values()), 1e-9),
        **parts,
    }
