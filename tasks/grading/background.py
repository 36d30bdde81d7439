"""A grader in a background thread, so that answers are graded while others are sampled.

The thread starts the processes of the pool and must outlive them, because they die with the thread
that started them. All waiting answers are graded together, to keep the processes busy. The number
of waiting answers is not bounded here: the caller bounds it."""

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from queue import SimpleQueue

from tasks.grading.grader import Answer, Grader
from tasks.grading.settings import Verify
from tasks.grading.verdict import Verdict

CANCEL_SECONDS = 5.0  # how long to wait for a cancelled thread, which may be busy with an answer

Request = tuple[Sequence[Answer], "Future[list[Verdict]]"]


class Cancelled(Exception):
    """Raised in the grading thread when its verdicts are no longer needed."""


class BackgroundGrader:
    """Grades submitted answers in order. Use it as a context manager, which cancels grading if its
    block raises, or call `close`.

    Too many failures among `total` answers raise FailureRateError, but only after `min_judged`
    answers (see `Grader`); after an error, every submission fails with the same error.
    `on_graded(n)` is called in the thread whenever n more answers are graded."""

    def __init__(
        self,
        settings: Verify,
        total: int = 0,
        on_graded: Callable[[int], object] | None = None,
        judged: Path | None = None,
        *,
        min_judged: int = 0,
    ) -> None:
        self.grader = Grader(settings, judged, total, min_judged)
        self.on_graded = on_graded
        self.is_cancelled = False
        self.failure: BaseException | None = None
        self.waiting: SimpleQueue[Request] = SimpleQueue()
        self.thread = ThreadPoolExecutor(1, "grader")  # started with the first answers

    def __enter__(self) -> "BackgroundGrader":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.is_cancelled = kind is not None
        self.close()

    def close(self) -> None:
        """Stop the processes and the thread once all submitted answers are graded. If the `with`
        block failed, cancel grading, and wait for at most CANCEL_SECONDS."""
        try:
            closed = self.thread.submit(self.grader.close)
        except RuntimeError:
            return  # already closed
        if self.is_cancelled:
            wait([closed], CANCEL_SECONDS)
        self.thread.shutdown(wait=closed.done() or not self.is_cancelled)

    def submit(self, answers: Sequence[Answer]) -> "Future[list[Verdict]]":
        """Return a future of the verdicts, one for each answer, in order."""
        future: Future[list[Verdict]] = Future()
        self.waiting.put((answers, future))
        self.thread.submit(self.run)
        return future

    def run(self) -> None:
        """Grade all waiting answers together. `submit` schedules one call per submission."""
        requests = [self.waiting.get() for _ in range(self.waiting.qsize())]
        answers = [answer for each, _ in requests for answer in each]
        try:
            if self.failure is not None:
                raise self.failure
            verdicts = iter(self.grader.grade(answers, self.report))
            for each, future in requests:
                future.set_result(list(itertools.islice(verdicts, len(each))))
        except BaseException as error:  # of any kind: it is passed to the caller
            self.failure = error
            for _, future in requests:
                if not future.done():
                    future.set_exception(error)

    def report(self, number: int) -> None:
        """Report `number` more verdicts, or raise Cancelled. Called several times a second."""
        if self.is_cancelled:
            raise Cancelled
        if self.on_graded and number:
            self.on_graded(number)
