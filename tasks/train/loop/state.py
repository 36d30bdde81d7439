"""What changes in a run, and a checkpoint keeps."""

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from tasks.common.ledger import Ledger

PLAIN = ("num_steps", "next_validation", "branch", "branch_start", "branches_done")
WORK = ("seconds", "flops", "tokens")
ROUNDING = 1e-9  # of shares of a run: 0.15 / 0.05 is not quite 3


class TrainingError(RuntimeError):
    """Training cannot go on; the message says at which step and why."""


@dataclass
class State:
    """How far a run has come, but for the learner's tensors and the methods' states.

    `steps` and `curve` are rows of STEPS and CURVE; `rollouts` are rows of TRAIN_ROLLOUTS since the
    last checkpoint. `next_validation` is the share of the run at which the curve's next point is
    due. `branch` is the share of the run at which the decayed branch ends that left the trunk after
    `branch_start` steps, None on the trunk; `branches_done` have ended. `work` is what all steps
    executed, those of branches among them. `part` is the part of a step that goes on.
    """

    num_steps: int = 0
    next_validation: float = 0.0
    branch: float | None = None
    branch_start: int = 0
    branches_done: int = 0
    work: dict[str, float] = field(default_factory=lambda: dict.fromkeys(WORK, 0.0))
    ledger: Ledger = field(default_factory=Ledger)
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    steps: list[dict[str, Any]] = field(default_factory=list)
    curve: list[dict[str, Any]] = field(default_factory=list)
    rollouts: list[dict[str, Any]] = field(default_factory=list)
    part: str = ""

    def trained(self, account: str) -> float:
        """FLOPs of training so far in one account: generation, scoring and update."""
        phases = getattr(self.ledger, account)
        return float(phases["generate"] + phases["score"] + phases["update"])

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        """Add the seconds of the block to `part`; until it ends, that is what goes on."""
        started, around = time.perf_counter(), self.part
        self.part = part
        yield
        self.part = around
        self.seconds[part] += time.perf_counter() - started

    def numbers(self) -> dict[str, Any]:
        """What `fill` needs beside the tables of steps and curve, as JSON has it."""
        plain = {name: getattr(self, name) for name in PLAIN}
        ledger, seconds, work = self.ledger.as_dict(), dict(self.seconds), dict(self.work)
        return {**plain, "ledger": ledger, "seconds": seconds, "work": work}

    def fill(
        self,
        numbers: Mapping[str, Any],
        steps: list[dict[str, Any]],
        curve: list[dict[str, Any]],
    ) -> None:
        """Go back to where a checkpoint was made."""
        for name in PLAIN:
            setattr(self, name, numbers[name])
        self.ledger = Ledger.from_dict(numbers["ledger"])
        self.seconds = defaultdict(float, numbers["seconds"])
        self.work = dict(numbers.get("work", self.work))  # an earlier version did not keep it
        self.steps, self.curve, self.rollouts = steps, curve, []
