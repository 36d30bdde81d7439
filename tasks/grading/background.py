"""A grader in a thread of its own, so that answers are judged while others are sampled.

The thread starts the processes of the pool, and ends after them: they die with the thread that
started them. All that waits is judged together, so that the processes have as much to do as there
is. Left out: a bound on what waits, which is the caller's."""

import contextlib
import itertools
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from queue import Empty, SimpleQueue

from tasks.grading.grader import Answer, Grader
from tasks.grading.settings import Verify
from tasks.grading.verdict import Verdict

KILL_SECONDS = 0.1  # between two kills of a pool whose thread was cancelled
MAX_KILLS = 50  # then the thread is left behind; it ends with its answer

Request = tuple[Sequence[Answer], "Future[list[Verdict]]"]


class Cancelled(Exception):
    """Nobody waits for the verdicts any more."""


class BackgroundGrader:
    """Judges what is submitted, in that order. Use as a context manager, which ends at once with an
    error, or call `close`.

    Of `total` answers in all, too many failures are a FailureRateError, but not before `min_judged`
    are judged (see `Grader.grade`); after an error everything that is submitted ends in it.
    `on_graded(n)` is called in the thread whenever n more are judged."""

    def __init__(
        self,
        settings: Verify,
        total: int = 0,
        on_graded: Callable[[int], object] | None = None,
        judged: Path | None = None,
        *,
        min_judged: int = 0,
    ) -> None:
        self.grader = Grader(settings, judged)
        self.total, self.min_judged = total, min_judged
        self.on_graded = on_graded
        self.is_cancelled = False
        self.waiting: SimpleQueue[Request | None] = SimpleQueue()
        self.thread: threading.Thread | None = None  # with the first answers

    def __enter__(self) -> "BackgroundGrader":
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.is_cancelled = kind is not None
        self.close()

    def close(self) -> None:
        """End the thread and the processes, once all that was submitted is judged."""
        thread, self.thread = self.thread, None
        if thread is None:
            return
        self.waiting.put(None)
        if self.is_cancelled:
            self.kill(thread)
        else:
            thread.join()

    def kill(self, thread: threading.Thread) -> None:
        """End the thread at once. It notices at the next verdict, or when the pool cannot start.
        Answers whose process was killed are asked again, so one kill is not enough."""
        for _ in range(MAX_KILLS):
            pool = self.grader.pool
            loader = pool.loader if pool is not None else None
            if loader is not None:
                loader.popen.kill()
            thread.join(KILL_SECONDS)
            if not thread.is_alive():
                return

    def submit(self, answers: Sequence[Answer]) -> "Future[list[Verdict]]":
        """Return the verdicts to come, one for each answer, in order."""
        if self.thread is None:
            self.thread = threading.Thread(target=self.run, name="grader", daemon=True)
            self.thread.start()
        future: Future[list[Verdict]] = Future()
        self.waiting.put((answers, future))
        return future

    def run(self) -> None:
        """Judge until there is nothing more to come."""
        failure: BaseException | None = None
        with self.grader as grader:
            while requests := self.take():
                answers = [answer for each, _ in requests for answer in each]
                try:
                    if failure is not None:
                        raise failure
                    verdicts = iter(
                        grader.grade(
                            answers, self.report, min_judged=self.min_judged, total=self.total
                        )
                    )
                    for each, future in requests:
                        future.set_result(list(itertools.islice(verdicts, len(each))))
                except BaseException as error:  # the caller's, whatever it is
                    failure = error
                    for _, future in requests:
                        if not future.done():
                            future.set_exception(error)

    def take(self) -> list[Request]:
        """All requests that wait, at least one; none when there is nothing more to come."""
        requests: list[Request] = []
        with contextlib.suppress(Empty):
            while (request := self.waiting.get(block=not requests)) is not None:
                requests.append(request)
            if requests:
                self.waiting.put(None)  # for the next time
        return requests

    def report(self, number: int) -> None:
        """Say that `number` more are judged."""
        if self.is_cancelled:
            raise Cancelled
        if self.on_graded:
            self.on_graded(number)
