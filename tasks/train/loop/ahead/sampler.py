"""Sampling in a thread, ahead of the updates (`TrainSettings.num_ahead`).

During the updates of a window, the batches of the next one are sampled, all from the policy at the
start of the window. Between windows both sides wait for each other. When the n batches of a window
are used, their policy is n to 2n - 1 steps old.

With `train.in_flight_updates` a window is one step, which begins when its batch is complete. After
each step the engine gets the new weights while it samples, and one more batch may begin: that of
`max_staleness` steps later. Whichever side is faster, `control` has observed the same steps when a
batch begins. A completion continues with the new policy, and records the policy of each token
(PipelineRL, arXiv 2509.19128). Both sides wait only when the policy is validated or a branch
ends."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any

import torch

from tasks.train.loop.ahead.queue import AheadQueue, ages
from tasks.train.loop.ahead.weights import SwappedWeights
from tasks.train.loop.queue import Batch
from tasks.train.loop.sampler import Sampler
from tasks.train.loop.trainer import Trainer


class AheadSampler(Sampler):
    """Fills the queue until the batches of the first `target` steps are complete. While `is_busy`,
    it has exclusive use of the engine and the grader."""

    def __init__(self, trainer: Trainer) -> None:
        super().__init__(trainer)
        assert isinstance(trainer.queue, AheadQueue)
        self.queue, self.lock = trainer.queue, trainer.queue.lock
        self.settings, self.is_ahead = trainer.run.settings, trainer.run.settings.num_ahead > 0
        self.has_windows = not self.settings.in_flight_updates
        self.num_a_window = max(self.settings.num_ahead, 1) if self.has_windows else 1
        self.num_threads = torch.get_num_threads()
        self.device = torch.cuda.current_device() if torch.cuda.is_available() else None
        self.target = 0
        self.is_busy = False
        self.error: BaseException | None = None

    def __enter__(self) -> "AheadSampler":
        if self.trainer.weights.version < 0:  # the sampler needs the version of its weights
            self.trainer.weights.load()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: Any, traceback: TracebackType | None
    ) -> None:
        """Wait for the batch in flight, unless an immediate interrupt ends the run."""
        with self.lock:
            self.target = 0
            if kind is not KeyboardInterrupt:
                self.lock.wait_for(lambda: not self.is_busy)

    def fill(self) -> None:
        """Wait until a batch (with windows, a whole window) is complete, or the run has ended."""
        queue, state = self.queue, self.trainer.state
        self.waited, self.sampled = state.seconds.get("wait", 0.0), queue.seconds
        with state.timed("wait" if self.is_ahead else "generate"):
            if self.is_ahead and not (self.has_windows and queue.num_complete):
                self.wait_until_filled()
                if self.trainer.budget is not None and not queue.batches:
                    # the end was predicted from costs of steps: check with their real costs
                    queue.observe(state.num_steps)
                    self.wait_until_filled()
            elif not queue.num_complete:
                queue.fill(self.trainer.weights.version)
        self.raise_error()

    def wait_until_filled(self) -> None:
        """Sample ahead until a batch (with windows, a whole window) is complete."""
        self.begin()
        with self.lock:
            self.lock.wait_for(
                lambda: not self.is_busy or (not self.has_windows and self.queue.num_complete > 0)
            )

    def take(self, until: float | None) -> list[Batch]:
        """Return the batches of a window, and start to sample those of the next one."""
        self.window = self.queue.take(self.num_a_window, until)
        if self.window:
            self.begin(self.window)
        if self.is_ahead:  # otherwise the step itself sampled and was timed
            seconds = self.trainer.state.seconds
            seconds["generate"] += sum(batch.seconds for batch in self.window)
        return self.window

    def begin(self, taken: Sequence[Batch] = ()) -> None:
        """Start to sample the batches after the `taken` ones, if batches are sampled ahead."""
        self.raise_error()
        if not self.is_ahead:
            return
        with self.lock:
            self.target = self.queue.num_sampled + self.settings.num_ahead
            if not self.has_windows:
                self.target = self.trainer.state.num_steps + self.settings.lead + 1
            self.queue.reserve(self.target, taken)
            self.start()

    def start(self) -> None:
        """Start the sampling thread, unless the target is reached."""
        if not self.is_busy and self.queue.num_sampled < self.target:
            # a daemon, so that it does not delay an immediate exit
            threading.Thread(target=self.work, name="sampler", daemon=True).start()
            self.is_busy = True

    def work(self) -> None:
        """Sample in the thread, until the target or the end of the run."""
        try:
            torch.set_num_threads(self.num_threads)  # this setting is per thread
            while self.has_work():
                with own_stream(self.device):
                    is_end = not self.queue.fill(self.trainer.weights.version)
                with self.lock:
                    self.target = 0 if is_end else self.target
                    self.lock.notify_all()
        except BaseException as error:  # raised again in the waiting thread
            with self.lock:
                self.error, self.is_busy = error, False
                self.lock.notify_all()

    def has_work(self) -> bool:
        """Return whether the target is not reached yet; at the target the thread ends."""
        with self.lock:
            self.is_busy = self.queue.num_sampled < self.target
            self.lock.notify_all()
            return self.is_busy

    def hand_over(self) -> None:
        """Load the new weights into the engine: at once if it is idle or accepts them while it
        samples; otherwise at the end of the window."""
        weights, ranks = self.trainer.weights, self.trainer.run.ranks
        if isinstance(weights, SwappedWeights) and any(ranks.all_gather(self.is_busy)):
            with self.trainer.state.timed("update"):
                weights.swap()
        elif not (self.has_windows and self.is_ahead):
            weights.catch_up()

    def end_window(self) -> None:
        """Wait for the window in flight, let the control observe the finished one, and load the new
        weights into the engine."""
        if self.has_windows:
            self.rest()
            self.queue.observe(self.trainer.state.num_steps)
            self.trainer.weights.catch_up()

    def rest(self) -> None:
        """Wait until sampling stops: after the window in flight or, with in-flight updates, after
        the batch in flight (the same batch on all ranks). Raise the sampling thread's error."""
        if not self.has_windows:
            with self.lock:
                self.target = min(self.target, self.queue.num_sampled + self.is_busy)
            last = max(self.trainer.run.ranks.all_gather(self.target))
            with self.lock:
                self.target = last
                self.start()
        if self.is_busy:
            with self.trainer.state.timed("wait"), self.lock:
                self.lock.wait_for(lambda: not self.is_busy)
        self.raise_error()

    def describe(self, steps: Sequence[dict[str, Any]], seconds: float) -> None:
        """Add also the ages of tokens, and the shares of time in which each side waited."""
        super().describe(steps, seconds)
        state, num, version = self.trainer.state, len(steps), self.trainer.learner.version
        if self.is_ahead:
            sampled, waited = self.queue.seconds, state.seconds.get("wait", 0.0)
            steps[-1]["trainer_idle_rate"] = min((waited - self.waited) / seconds, 1.0)
            steps[-1]["sampler_idle_rate"] = max(1.0 - (sampled - self.sampled) / seconds, 0.0)
            steps[-1]["window_batches"] = float(num)
        for row, batch in zip(reversed(steps), reversed(self.window), strict=True):
            version -= row["num_updates"]
            row.update(ages(version, batch))

    def raise_error(self) -> None:
        if self.error is not None:
            raise self.error


@contextmanager
def own_stream(device: int | None) -> Iterator[None]:
    """Use the device in this thread with a separate CUDA stream, because operations that two
    threads queue on one stream run one after another."""
    if device is None:
        yield
        return
    torch.cuda.set_device(device)
    try:
        with torch.cuda.stream(torch.cuda.Stream()):
            yield
    finally:
        torch.cuda.synchronize()
