"""Who fills the buffer: the step itself, or a thread that samples the batches of the next steps
while this one learns (`TrainSettings.num_ahead`).

Sampling ahead goes in rounds. While the batches of a round are learned from, those of the next are
sampled, all from the policy as it was when the round began. Then both sides wait for each other,
the methods that decide what is sampled learn of the round, the engine gets the new weights, and a
probe shows that it has them. A round of n batches is learned from n to 2n - 1 steps after its
policy.

With `train.in_flight_updates` there are no rounds. A step begins when its batch is complete. After
each step the engine gets the new weights, while it samples, and one batch more may be begun: that
of `max_staleness` steps later. Control has observed the same steps then, whichever side is fast. A
completion goes on with the new policy, and records of each token which one wrote it (PipelineRL,
arXiv 2509.19128). Both sides wait for each other only where the policy is validated and where a
branch ends."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType

import torch

from tasks.train.loop.buffer import Batch
from tasks.train.loop.trainer import Trainer


class Sampler:
    """Fills the buffer until the batches of the first `target` steps are complete. It has the
    engine and the grader to itself while it `is_busy`."""

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
        if self.trainer.engine_version < 0:  # it must know the version of what it has
            self.trainer.sync_engine()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Wait for the batch in flight, whatever comes of it; an interrupt at once does not."""
        with self.lock:
            self.target = 0
            if kind is not KeyboardInterrupt:
                self.lock.wait_for(lambda: not self.is_busy)

    def fill(self) -> None:
        """Return when a batch is complete (with rounds all of one), or the run is at its end."""
        buffer, state = self.buffer, self.trainer.state
        with state.timed("wait" if self.is_ahead else "generate"):
            if self.is_ahead and not (self.has_rounds and buffer.num_complete):
                self.wait_until_filled()
                if buffer.spending is not None and not buffer.batches:
                    # it ended by what steps are predicted to cost: see what they did cost
                    buffer.observe(state.num_steps)
                    self.wait_until_filled()
            elif not buffer.num_complete:
                buffer.reserve(buffer.num_sampled + 1)
                buffer.fill(self.trainer.engine_version)
        self.raise_error()

    def wait_until_filled(self) -> None:
        """Sample what is ahead, and return when a batch is complete (with rounds all of one)."""
        self.begin()
        with self.lock:
            self.lock.wait_for(
                lambda: not self.is_busy or (not self.has_rounds and self.buffer.num_complete > 0)
            )

    def begin(self, taken: Sequence[Batch] = ()) -> None:
        """Sample what comes after the batches that were `taken`, if any is ahead."""
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
        """Have the thread sample, unless the target is reached."""
        if not self.is_busy and self.buffer.num_sampled < self.target:
            # it must not keep a process alive that is to end at once
            threading.Thread(target=self.work, name="sampler", daemon=True).start()
            self.is_busy = True

    def work(self) -> None:
        """In the thread: sample until the target, or the end of the run."""
        try:
            torch.set_num_threads(self.num_threads)  # it is a thread's own setting
            while self.has_work():
                with own_stream(self.device):
                    is_end = not self.buffer.fill(self.trainer.engine_version)
                with self.lock:
                    self.target = 0 if is_end else self.target
                    self.lock.notify_all()
        except BaseException as error:  # it is raised again in the thread that waits
            with self.lock:
                self.error, self.is_busy = error, False
                self.lock.notify_all()

    def has_work(self) -> bool:
        """Whether the target is not reached; the thread ends where it is."""
        with self.lock:
            self.is_busy = self.buffer.num_sampled < self.target
            self.lock.notify_all()
            return self.is_busy

    def hand_over(self) -> None:
        """Give the engine the new weights: at once where it is idle or takes them while it samples;
        else they wait for the end of the round."""
        if not self.has_rounds and any(self.trainer.run.ranks.all_gather(self.is_busy)):
            with self.trainer.state.timed("update"):
                self.trainer.swap_weights()
        elif not (self.has_rounds and self.is_ahead):
            self.catch_up()

    def catch_up(self) -> None:
        """Give the engine, which is idle, the newest weights, unless it has them."""
        if self.trainer.engine_version != self.trainer.learner.version:
            with self.trainer.state.timed("update"):
                self.trainer.sync_engine()

    def end_round(self) -> None:
        """Where there are rounds, wait for the one in flight, have control observe what was learned
        from, and give the engine the new weights."""
        if self.has_rounds:
            self.wait_until_idle()
            self.buffer.observe(self.trainer.state.num_steps)
            self.catch_up()

    def wait_until_idle(self) -> None:
        """Return when nothing is sampled any more: with rounds the one in flight is complete, and
        without the batch in flight, the same on every rank. Raises what sampling raised."""
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
    """The device of another thread, and a queue of one's own on it: what two threads put into one
    queue is computed in turn."""
    if device is None:
        yield
        return
    torch.cuda.set_device(device)
    try:
        with torch.cuda.stream(torch.cuda.Stream()):
            yield
    finally:
        torch.cuda.synchronize()
