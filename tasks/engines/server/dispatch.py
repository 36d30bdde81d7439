"""The assignment of rows to servers that may fail: each chunk goes to the server with the fewest
rows in flight, and a failed server's rows go back into the queue.

A row is one completion. A chunk is a list of rows of one prompt for one server, which then computes
the prefill once. A server that fails gets no rows for a pause, which doubles each time, and must
then pass a health check. If one row, or every server, has failed more than `max_retries` times, the
run fails with an error that names the server and the failure.

A server can also hang: its connections stay open without a response. So every server is probed at
intervals. If it responds to no probe in MAX_MISSED intervals, it is dead: its requests are
cancelled, and its rows move to the other servers. A row is never sent to two servers in a race,
because the winner would depend on the completion's length."""

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from tasks.common.files import ArtifactError
from tasks.engines.engine import NoServerError, Unavailable

logger = logging.getLogger(__name__)

# seconds before a failed server is checked again, doubled after every failure
FIRST_PAUSE = 0.2
LONGEST_PAUSE = 30.0
BEAT_SECONDS = 10.0  # between two probes
MAX_MISSED = 3

T = TypeVar("T")
S = TypeVar("S")


@dataclass
class Dispatch(Generic[S, T]):
    """The distribution of rows over `servers`, at most `max_in_flight` at each. `ask(server, row)`
    returns a row's result, or raises Unavailable. `check(server)` raises Unavailable unless the
    server is healthy. `is_alive(server)` returns whether the server responds to a probe, however
    long that takes. `give_up(server)` stops a dead server, and returns its name for messages."""

    servers: Sequence[S]
    ask: Callable[[S, int], Awaitable[T]]
    check: Callable[[S], Awaitable[object]]
    is_alive: Callable[[S], Coroutine[Any, Any, bool]]
    give_up: Callable[[S], str]
    max_in_flight: int
    max_retries: int
    beat_seconds: float = BEAT_SECONDS
    answers: dict[int, T] = field(default_factory=dict)
    attempts: Counter[int] = field(default_factory=Counter)  # failures of a row
    failures: Counter[int] = field(default_factory=Counter)  # in succession, by server number
    down: dict[int, str] = field(default_factory=dict)  # servers without rows, and the reason

    def __post_init__(self) -> None:
        self.in_flight: list[dict[int, asyncio.Task[None]]] = [{} for _ in self.servers]
        self.own: list[deque[int]] = [deque() for _ in self.servers]  # rest of a server's chunk
        self.are_answered = asyncio.Event()

    async def run(self, chunks: Iterable[Sequence[int]]) -> dict[int, T]:
        """Return every row's result. Raise ArtifactError if a row has failed too often, and
        NoServerError if every server has."""
        self.chunks = deque(chunk for chunk in chunks if chunk)
        self.num_rows = sum(map(len, self.chunks))
        if not self.num_rows:
            return self.answers
        if not self.servers:
            raise NoServerError("there is no server")
        try:
            async with asyncio.TaskGroup() as self.tasks:
                numbers = range(len(self.servers))
                watching = [*map(self.listen, numbers), *map(self.recover, self.down)]
                self.watching = [self.tasks.create_task(each) for each in watching]
                self.assign()
                await self.are_answered.wait()
                cancel_all(self.watching)  # one may wait for a server that hangs
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
        return self.answers

    def assign(self) -> None:
        """Start rows while servers have room for them. Each chunk goes to the server with the
        fewest rows in flight, and the rest of the chunk waits for the same server."""
        while self.chunks:
            free = [
                number
                for number, rows in enumerate(self.in_flight)
                if number not in self.down and len(rows) < self.max_in_flight
            ]
            if not free:
                return
            number = min(free, key=lambda number: len(self.in_flight[number]))
            self.own[number].extend(self.chunks.popleft())
            self.fill(number)

    def fill(self, number: int) -> None:
        """While a server has room, start rows that are assigned to it."""
        own, rows = self.own[number], self.in_flight[number]
        while own and len(rows) < self.max_in_flight:
            row = own.popleft()
            rows[row] = self.tasks.create_task(self.work(number, row))

    async def work(self, number: int, row: int) -> None:
        """Send a row to a server, then start as many rows as there is room for."""
        try:
            self.answers[row] = await self.ask(self.servers[number], row)
        except Unavailable as error:
            self.put_back(row, str(error))
            self.take_down(number, str(error))
        else:
            self.failures[number] = 0
        del self.in_flight[number][row]
        if len(self.answers) == self.num_rows:
            self.are_answered.set()
        self.fill(number)
        self.assign()

    def on_silence(self, number: int) -> None:
        """Stop a server that responds to no probes, and move its rows to the other servers."""
        seconds = self.beat_seconds * MAX_MISSED
        why = f"{self.give_up(self.servers[number])} sent no heartbeat for {seconds:g} s"
        lost, self.in_flight[number] = self.in_flight[number], {}
        for row in reversed(lost):
            lost[row].cancel()
            self.put_back(row, why)
        self.take_down(number, why)
        self.assign()

    def take_down(self, number: int, why: str) -> None:
        """Mark a server as down, requeue its unstarted rows, and begin to check its health."""
        if self.own[number]:
            self.chunks.appendleft(list(self.own[number]))
            self.own[number].clear()
        if number not in self.down:  # the rows in flight together count as one failure
            self.mark_down(number, why)
            self.watching.append(self.tasks.create_task(self.recover(number)))
            logger.warning("%s; other servers take its rows until it is healthy again", why)

    def put_back(self, row: int, why: str) -> None:
        """Put a failed row back into the queue. Raise ArtifactError if it has failed too often."""
        self.attempts[row] += 1
        if self.attempts[row] > self.max_retries:
            raise ArtifactError(
                f"a completion failed {self.attempts[row]} times; the last failure: {why}"
            )
        self.chunks.appendleft([row])

    def mark_down(self, number: int, why: str) -> None:
        """Count a failure, and assign no rows to the server until it has passed a health check."""
        self.failures[number] += 1
        self.down[number] = why

    async def recover(self, number: int) -> None:
        """Check the health of a server that is down, after a pause each time, until it is up again.
        Raise NoServerError if every server has failed too often."""
        while number in self.down:
            lost = [n for n in self.down if self.failures[n] > self.max_retries]
            if len(lost) == len(self.servers):
                reasons = "; ".join(self.down[n] for n in sorted(lost))
                raise NoServerError(f"no server answers: {reasons}")
            await asyncio.sleep(min(FIRST_PAUSE * 2 ** (self.failures[number] - 1), LONGEST_PAUSE))
            try:
                await self.check(self.servers[number])
            except Unavailable as error:
                self.mark_down(number, str(error))
            else:
                del self.down[number]
        self.assign()

    async def listen(self, number: int) -> None:
        """Probe a server at every beat, and declare it dead if it has responded to none of
        MAX_MISSED probes.

        A late response counts. This process sleeps between beats. If it is delayed, its beats are
        delayed, too, so no server misses a beat because of the delay."""
        beats: list[asyncio.Task[bool]] = []  # since the last answer
        try:
            while True:
                beats.append(self.tasks.create_task(self.is_alive(self.servers[number])))
                await asyncio.sleep(self.beat_seconds)
                is_alive = any(beat.done() and beat.result() for beat in beats)
                if not is_alive and number not in self.down:
                    if len(beats) < MAX_MISSED:
                        continue
                    self.on_silence(number)
                cancel_all(beats)
        finally:
            cancel_all(beats)


def cancel_all(tasks: list[asyncio.Task[T]]) -> None:
    """Cancel all tasks of a list, and empty it."""
    for task in tasks:
        task.cancel()
    tasks.clear()


def chunked(counts: Iterable[int], size: int) -> list[list[int]]:
    """Split rows into chunks of row numbers. Rows come in consecutive groups of `counts[i]` rows,
    and a chunk contains up to `size` rows of one group."""
    chunks: list[list[int]] = []
    start = 0
    for count in counts:
        rows = range(start, start + count)
        chunks += [list(rows[first : first + size]) for first in range(0, count, size)]
        start += count
    return chunks
