"""Who fills the buffer: the step itself, or a thread that samples the batches of the next steps
while this one learns (`TrainSettings.num_ahead`).

Sampling ahead goes in rounds. While the batches of a round are learned from, those of the next are
sampled, all from the policy as it was when the round began. Then both sides wait for each other,
the methods that decide what is sampled learn of the round, the engine gets the new weights, and a
probe shows that it has them. A round of n batches is learned from n to 2n - 1 steps after its
policy. With `train.in_flight_updates` the engine gets the weights after every update instead, while
it samples: a completion goes on with the new policy, and records of each token which one wrote it
(PipelineRL, arXiv 2509.19128)."""

import threading
from collections.abc import Sequence
from concurrent.futures import Future
from types import TracebackType
from typing import Any

import torch

from tasks.train.loop.buffer import Batch
from tasks.train.loop.trainer import Trainer


class Sampler:
    """Has the engine, the grader, and what control remembers to itself from `begin` to `wait`."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.num_ahead = trainer.run.settings.num_ahead
        self.num_threads = torch.get_num_threads()
        self.device = torch.cuda.current_device() if torch.cuda.is_available() else None
        self.result: Future[None] | None = None
        self.is_behind = False  # whether the engine has older weights than the learner

    def __enter__(self) -> "Sampler":
        if self.trainer.run.settings.in_flight_updates:  # the engine must know their version
            self.trainer.sync_engine()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Wait for a round in flight, whatever came of it; a second interrupt does not."""
        if self.result is not None and kind is not KeyboardInterrupt:
            self.result.exception()

    def fill(self) -> None:
        """Have the next batches complete: those of a round, or one that a step samples itself."""
        buffer, num = self.trainer.buffer, max(self.num_ahead, 1)
        if not buffer.num_complete:
            with self.trainer.state.timed("wait" if self.num_ahead else "generate"):
                buffer.reserve(num)
                buffer.fill(num, self.trainer.learner.version)

    def begin(self, taken: Sequence[Batch]) -> None:
        """Sample the round that comes after the batches that were `taken`, if any is ahead."""
        if not self.num_ahead:
            return
        self.trainer.buffer.reserve(self.num_ahead, taken)
        self.result = Future()
        arguments = [self.result, self.trainer.learner.version]
        # it must not keep a process alive that is to end at once
        threading.Thread(target=self.work, args=arguments, name="sampler", daemon=True).start()

    def work(self, result: "Future[None]", version: int) -> None:
        """In the thread: sample the round."""
        try:
            torch.set_num_threads(self.num_threads)  # it is a thread's own setting
            with Stream(self.device):
                self.trainer.buffer.fill(self.num_ahead, version)
            result.set_result(None)
        except BaseException as error:  # it is raised again in the thread that waits
            result.set_exception(error)

    def hand_over(self) -> None:
        """Give the engine the new weights: at once where it is idle, and with
        `train.in_flight_updates` while it samples; else they wait for the end of the round."""
        self.is_behind = True
        if not self.num_ahead:
            self.catch_up()
        elif self.trainer.run.settings.in_flight_updates:
            is_busy = self.result is not None and not self.result.done()
            if any(self.trainer.run.ranks.all_gather(is_busy)):
                with self.trainer.state.timed("update"):
                    self.trainer.swap_weights()

    def catch_up(self) -> None:
        """Give the engine, which is idle, the newest weights, unless it has them."""
        if self.is_behind:
            with self.trainer.state.timed("update"):
                self.trainer.sync_engine()
        self.is_behind = False

    def wait(self) -> None:
        """Return when the round is sampled. Raises what sampling raised."""
        if self.result is not None:
            with self.trainer.state.timed("wait"):
                self.result.result()
            self.result = None


class Stream:
    """The device of another thread, and a queue of one's own on it: what two threads put into one
    queue is computed in turn."""

    def __init__(self, device: int | None) -> None:
        self.device = device

    def __enter__(self) -> None:
        if self.device is not None:
            torch.cuda.set_device(self.device)
            self.stream = torch.cuda.stream(torch.cuda.Stream())
            self.stream.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self.device is not None:
            self.stream.__exit__(*error)
            torch.cuda.synchronize()
