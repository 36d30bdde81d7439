"""Rows assigned to servers that may fail: each chunk goes to the server with the least in flight,
and a failed server's rows go back into the queue.

A chunk is a list of rows best answered by one server (completions of one prompt, whose prefill it
then computes once). A server that fails is left alone for a while, longer each time, and must pass
a health check before it gets rows again. A row, and a server, may fail `max_retries` times in a
row; then the whole run ends with an error that names the server and the failure.

A server can also hang: its connections stay open and nothing is answered. So every server is asked
for a sign of life at intervals. Without one in MAX_MISSED intervals it is dead: its requests are
cancelled, and its rows are moved to the others. They are not raced: which answer comes first would
depend on a completion's length."""

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from typing import Any, Generic, TypeVar

from tasks.common.files import ArtifactError
from tasks.engines.engine import NoServerError, Unavailable

logger = logging.getLogger(__name__)

# seconds before a failed server is checked again, doubled after every failure
FIRST_PAUSE = 0.2
LONGEST_PAUSE = 30.0
BEAT_SECONDS = 10.0  # between two signs of life
MAX_MISSED = 3

T = TypeVar("T")
S = TypeVar("S")


class Dispatch(Generic[S, T]):
    """One run of rows over `servers`. `ask(server, row)` answers a row; `check(server)` returns
    when the server is healthy. Both raise Unavailable. `is_alive(server)` returns whether it shows
    a sign of life, whenever it does; `give_up(server)` ends one that is dead, and returns what to
    call it in messages."""

    def __init__(
        self,
        servers: Sequence[S],
        ask: Callable[[S, int], Awaitable[T]],
        check: Callable[[S], Awaitable[object]],
        is_alive: Callable[[S], Coroutine[Any, Any, bool]],
        give_up: Callable[[S], str],
        max_in_flight: int,
        max_retries: int,
        beat_seconds: float = BEAT_SECONDS,
    ) -> None:
        self.servers = servers
        self.ask = ask
        self.check = check
        self.is_alive = is_alive
        self.give_up = give_up
        self.max_in_flight = max_in_flight
        self.max_retries = max_retries
        self.beat_seconds = beat_seconds
        self.answers: dict[int, T] = {}
        self.attempts: Counter[int] = Counter()  # failures of a row
        self.failures: Counter[int] = Counter()  # failures in a row of a server, by its number
        self.down: dict[int, str] = {}  # servers that get no rows, by number, and why
        self.in_flight: list[dict[int, asyncio.Task[None]]] = [{} for _ in servers]
        self.own: list[deque[int]] = [deque() for _ in servers]  # rest of a server's chunk
        self.are_answered = asyncio.Event()

    async def run(self, chunks: Iterable[Sequence[int]]) -> dict[int, T]:
        """Return the answer to every row. Raises ArtifactError when a row or every server has
        failed too often."""
        self.chunks = deque(chunk for chunk in chunks if chunk)
        self.num_rows = sum(map(len, self.chunks))
        if not self.num_rows:
            return self.answers
        if not self.servers:
            raise NoServerError("no server is there")
        try:
            async with asyncio.TaskGroup() as self.tasks:
                self.watching = [
                    self.tasks.create_task(self.listen(number))
                    for number in range(len(self.servers))
                ]
                for number in self.down:
                    self.watch_down(number)
                self.assign()
                await self.are_answered.wait()
                cancel_all(self.watching)  # one may wait for a server that hangs
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
        return self.answers

    def assign(self) -> None:
        """Start rows while servers have room for them, a chunk at the server with the least in
        flight. What a server has no room for of its chunk waits for that server."""
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
        """Start a server's own rows while it has room."""
        own, rows = self.own[number], self.in_flight[number]
        while own and len(rows) < self.max_in_flight:
            row = own.popleft()
            rows[row] = self.tasks.create_task(self.work(number, row))

    async def work(self, number: int, row: int) -> None:
        """Answer a row through a server, and start what there is room for then."""
        try:
            self.answers[row] = await self.ask(self.servers[number], row)
        except Unavailable as error:
            self.on_failure(number, row, str(error))
        else:
            self.failures[number] = 0
        del self.in_flight[number][row]
        if len(self.answers) == self.num_rows:
            self.are_answered.set()
        self.fill(number)
        self.assign()

    def on_failure(self, number: int, row: int, why: str) -> None:
        """Take the server down, and put the row back into the queue."""
        self.put_back(row, why)
        self.take_down(number, why)

    def on_silence(self, number: int) -> None:
        """End a server that is dead, and move its rows to the others."""
        seconds = self.beat_seconds * MAX_MISSED
        why = f"{self.give_up(self.servers[number])} gave no sign of life for {seconds:g} s"
        lost, self.in_flight[number] = self.in_flight[number], {}
        for row in reversed(lost):
            lost[row].cancel()
            self.put_back(row, why)
        self.take_down(number, why)
        self.assign()

    def take_down(self, number: int, why: str) -> None:
        """Mark a server as down, and put the rest of its chunk back into the queue."""
        if self.own[number]:
            self.chunks.appendleft(list(self.own[number]))
            self.own[number].clear()
        if number not in self.down:  # only the first of the rows that it had in flight counts
            self.mark_down(number, why)
            self.watch_down(number)
            logger.warning("%s; other servers take its rows until it is healthy again", why)

    def put_back(self, row: int, why: str) -> None:
        """Put a row that failed back into the queue."""
        self.attempts[row] += 1
        if self.attempts[row] > self.max_retries:
            raise ArtifactError(
                f"a completion failed {self.attempts[row]} times; the last failure: {why}"
            )
        self.chunks.appendleft([row])

    def mark_down(self, number: int, why: str) -> None:
        """Assign no rows to a server until it has passed a health check."""
        self.failures[number] += 1
        self.down[number] = why

    def watch_down(self, number: int) -> None:
        self.watching.append(self.tasks.create_task(self.recover(number)))

    async def recover(self, number: int) -> None:
        """Check the health of a server that is down after a pause, until it is up again."""
        while number in self.down:
            await self.pause(number)
            try:
                await self.check(self.servers[number])
            except Unavailable as error:
                self.mark_down(number, str(error))
            else:
                del self.down[number]
        self.assign()

    async def pause(self, number: int) -> None:
        """Wait before the next health check. Raises NoServerError when every server has failed too
        often."""
        lost = [n for n in self.down if self.failures[n] > self.max_retries]
        if len(lost) == len(self.servers):
            raise NoServerError(
                "no server answers: " + "; ".join(self.down[n] for n in sorted(lost))
            )
        await asyncio.sleep(min(FIRST_PAUSE * 2 ** (self.failures[number] - 1), LONGEST_PAUSE))

    async def listen(self, number: int) -> None:
        """Ask a server for a sign of life at every beat, and declare it dead when MAX_MISSED of
        them have brought none.

        An answer counts however late it comes. A beat is not a time on the clock: where this
        process itself is late, its beats are, too, and nothing is missed meanwhile."""
        beats: list[asyncio.Task[bool]] = []  # since the last sign of life
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
    """Row numbers of consecutive groups of `counts` rows, cut into chunks of one group and at most
    `size` rows."""
    chunks: list[list[int]] = []
    start = 0
    for count in counts:
        rows = range(start, start + count)
        chunks += [list(rows[first : first + size]) for first in range(0, count, size)]
        start += count
    return chunks
