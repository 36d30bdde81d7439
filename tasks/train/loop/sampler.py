"""Sampling for the next step: its own batch, before its update."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

from tasks.train.loop.queue import Batch
from tasks.train.loop.trainer import Trainer


class Sampler(AbstractContextManager[Any]):
    """Fills the queue, and gives the engine the weights of every step. A window is one step."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer

    def __exit__(
        self, kind: type[BaseException] | None, error: Any, traceback: TracebackType | None
    ) -> None:
        """End sampling."""

    def fill(self) -> None:
        """Request, sample and grade the batches of the next window, unless the run has ended."""
        queue = self.trainer.queue
        with self.trainer.state.timed("generate"):
            if not queue.num_complete:
                queue.fill(self.trainer.weights.version)

    def take(self, until: float | None) -> list[Batch]:
        """Return the batches of a window, up to the share `until` of the run."""
        return self.trainer.queue.take(1, until)

    def hand_over(self) -> None:
        """Load the weights of a step into the engine."""
        self.trainer.weights.catch_up()

    def end_window(self) -> None:
        """Let the methods that control sampling observe the window."""
        self.trainer.queue.observe(self.trainer.state.num_steps)

    def rest(self) -> None:
        """Wait until the engine is idle, as it is here between windows."""

    def describe(self, steps: Sequence[dict[str, Any]], seconds: float) -> None:
        """Add values for the record to the rows of the window's steps, which took `seconds`."""
        steps[-1].update(self.trainer.queue.describe())
