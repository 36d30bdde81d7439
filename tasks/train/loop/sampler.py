"""The buffer is filled by the step itself, or by a thread that samples the batches of the next
steps during the updates of the current ones (`TrainSettings.num_ahead`).

Sampling ahead works in rounds. During the updates of a round, the batches of the next one are
sampled, all from the policy at the start of the round. Then both sides wait for each other, the
methods that control sampling observe the round, the engine gets the new weights, and a probe
verifies them. When the n batches of a round are used, their policy is n to 2n - 1 steps old.

With `train.in_flight_updates` there are no rounds. A step begins when its batch is complete. After
each step the engine gets the new weights while it samples, and one more batch may begin: that of
`max_staleness` steps later. Whichever side is faster, `control` has observed the same steps when a
batch begins. A completion continues with the new policy, and records the policy of each token
(PipelineRL, arXiv 2509.19128). Both sides wait for each other only when the policy is validated and
when a branch ends."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from tasks.train.loop.ahead.weights import SwappedWeights
from tasks.train.loop.buffer import Batch
from tasks.train.loop.trainer import Trainer


class Sampler:
    """Fills the buffer until the batches of the first `target` steps are complete. While `is_busy`,
    it has exclusive use of the engine and the grader."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer, self.buffer, self.lock = trainer, trainer.buffer, trainer.buffer.lock
        self.settings, self.is_ahead = trainer.run.settings, trainer.run.settings.num_ahead > 0
        self.has_rounds = not self.settings.in_flight_updates
        self.num_a_round = max(self.settings.num_ahead, 1) if self.has_rounds else 1
        self.num_threads = torch.get_num_threads()
        self.device = torch.cuda.current_device() if torch.cuda.is_available() else None
        self.target = 0
        self.is_busy = False
        self.error: BaseException | None = None

    def __enter__(self) -> "Sampler":
        if self.trainer.weights.version < 0:  # the sampler needs the version of its weights
            self.trainer.weights.load()
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        """Wait for the batch in flight, unless an immediate interrupt ends the run."""
        with self.lock:
            self.target = 0
            if kind is not KeyboardInterrupt:
                self.lock.wait_for(lambda: not self.is_busy)

    def fill(self) -> None:
        """Wait until a batch (with rounds, a whole round) is complete, or the run has ended."""
        buffer, state = self.buffer, self.trainer.state
        with state.timed("wait" if self.is_ahead else "generate"):
            if self.is_ahead and not (self.has_rounds and buffer.num_complete):
                self.wait_until_filled()
                if self.trainer.budget is not None and not buffer.batches:
                    # the end was predicted from costs of steps: check with their real costs
                    buffer.observe(state.num_steps)
                    self.wait_until_filled()
            elif not buffer.num_complete:
                buffer.reserve(buffer.num_sampled + 1)
                buffer.fill(self.trainer.weights.version)
        self.raise_error()

    def wait_until_filled(self) -> None:
        """Sample ahead until a batch (with rounds, a whole round) is complete."""
        self.begin()
        with self.lock:
            self.lock.wait_for(
                lambda: not self.is_busy or (not self.has_rounds and self.buffer.num_complete > 0)
            )

    def begin(self, taken: Sequence[Batch] = ()) -> None:
        """Start to sample the batches after the `taken` ones, if batches are sampled ahead."""
        self.raise_error()
        if not self.is_ahead:
            return
        with self.lock:
            self.target = self.buffer.num_sampled + self.settings.num_ahead
            if not self.has_rounds:
                self.target = self.trainer.state.num_steps + self.settings.lead + 1
            self.buffer.reserve(self.target, taken)
            self.start()

    def start(self) -> None:
        """Start the sampling thread, unless the target is reached."""
        if not self.is_busy and self.buffer.num_sampled < self.target:
            # a daemon, so that it does not delay an immediate exit
            threading.Thread(target=self.work, name="sampler", daemon=True).start()
            self.is_busy = True

    def work(self) -> None:
        """Sample in the thread, until the target or the end of the run."""
        try:
            torch.set_num_threads(self.num_threads)  # this setting is per thread
            while self.has_work():
                with own_stream(self.device):
                    is_end = not self.buffer.fill(self.trainer.weights.version)
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
            self.is_busy = self.buffer.num_sampled < self.target
            self.lock.notify_all()
            return self.is_busy

    def hand_over(self) -> None:
        """Load the new weights into the engine: at once if it is idle or accepts them while it
        samples; otherwise at the end of the round."""
        weights, ranks = self.trainer.weights, self.trainer.run.ranks
        if isinstance(weights, SwappedWeights) and any(ranks.all_gather(self.is_busy)):
            with self.trainer.state.timed("update"):
                weights.swap()
        elif not (self.has_rounds and self.is_ahead):
            weights.catch_up()

    def end_round(self) -> None:
        """With rounds, wait for the round in flight, let the control observe the finished one, and
        load the new weights into the engine."""
        if self.has_rounds:
            self.wait_until_idle()
            self.buffer.observe(self.trainer.state.num_steps)
            self.trainer.weights.catch_up()

    def wait_until_idle(self) -> None:
        """Wait until sampling stops: after the round in flight or, without rounds, after the batch
        in flight (the same batch on all ranks). Raise the sampling thread's error."""
        if not self.has_rounds:
            with self.lock:
                self.target = min(self.target, self.buffer.num_sampled + self.is_busy)
            last = max(self.trainer.run.ranks.all_gather(self.target))
            with self.lock:
                self.target = last
                self.start()
        if self.is_busy:
            with self.trainer.state.timed("wait"), self.lock:
                self.lock.wait_for(lambda: not self.is_busy)
        self.raise_error()

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
