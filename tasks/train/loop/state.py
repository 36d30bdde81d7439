"""Mutable state of a run, which a checkpoint contains."""

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import polars as pl

from tasks.common.accounting.ledger import Ledger

PLAIN = (
    "num_steps",
    "num_warm_steps",
    "progress",
    "next_validation",
    "branch",
    "branch_start",
    "branches_done",
)
WORK = ("seconds", "flops", "tokens")
ROUNDING = 1e-9  # tolerance of shares of a run: 0.15 / 0.05 is not exactly 3


class TrainingError(RuntimeError):
    """Raised if training cannot continue; the message names the step and the reason."""


@dataclass
class State:
    """The progress of a run, without the learner's tensors and the methods' states.

    `num_warm_steps` counts the steps of the warm start; `progress` is the share of the run that is
    done after the steps that began. `steps` and `curve` are rows of STEPS and CURVE; `rollouts` are
    tables of TRAIN_ROLLOUTS, one per step since the last checkpoint. `next_validation` is the share
    of the run at which the curve's next point is due. `branch` is the share of the run at which the
    current decayed branch ends, None on the trunk; the branch began after `branch_start` steps.
    `branches_done` counts ended branches. `work` is the work of all steps and branches, without
    sampling already checkpointed. `part` is the part being timed."""

    num_steps: int = 0
    num_warm_steps: int = 0
    progress: float = 0.0
    next_validation: float = 0.0
    branch: float | None = None
    branch_start: int = 0
    branches_done: int = 0
    work: dict[str, float] = field(default_factory=lambda: dict.fromkeys(WORK, 0.0))
    ledger: Ledger = field(default_factory=Ledger)
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    steps: list[dict[str, Any]] = field(default_factory=list)
    curve: list[dict[str, Any]] = field(default_factory=list)
    rollouts: list[pl.DataFrame] = field(default_factory=list)
    part: str = ""

    def latest_step(self) -> str:
        """Return the last step as text, such as `step 3`."""
        return f"step {self.num_steps - 1}" if self.num_steps else "a step of the warm start"

    def trained(self, account: str) -> float:
        """Return the FLOPs of training so far in one account: generation, scoring and update."""
        phases = getattr(self.ledger, account)
        return float(phases["generate"] + phases["score"] + phases["update"])

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Make `part` the current part during the block, and add the block's duration to it."""
        started, around = time.perf_counter(), self.part
        self.part = part
        yield
        self.part = around
        self.seconds[part] += time.perf_counter() - started

    def numbers(self) -> dict[str, Any]:
        """Return the values for `restore` as JSON, except the tables `steps` and `curve`."""
        plain = {name: getattr(self, name) for name in PLAIN}
        ledger, seconds, work = self.ledger.as_dict(), dict(self.seconds), dict(self.work)
        return {**plain, "ledger": ledger, "seconds": seconds, "work": work}

    def restore(
        self,
        numbers: Mapping[str, Any],
        steps: list[dict[str, Any]],
        curve: list[dict[str, Any]],
    ) -> None:
        for name in PLAIN:
            setattr(self, name, numbers[name])
        self.ledger = Ledger.from_dict(numbers["ledger"])
        self.seconds = defaultdict(float, numbers["seconds"])
        self.work = dict(numbers["work"])
        self.steps, self.curve, self.rollouts = steps, curve, []
