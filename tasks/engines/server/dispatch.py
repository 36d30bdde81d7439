"""Rows assigned to servers that may fail: a free server takes the next chunk, and a failed server's
rows go back into the queue.

A chunk is a list of rows best answered by one server (completions of one prompt, whose prefill it
then computes once). A server that fails is left alone for a while, longer each time, and must pass
a health check before it gets rows again. A row, and a server, may fail `max_retries` times in a
row; then the whole run ends with an error that names the server and the failure."""

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from typing import Generic, TypeVar

from tasks.common.files import ArtifactError
from tasks.engines.engine import NoServerError, Unavailable

logger = logging.getLogger(__name__)

# seconds before a failed server is checked again, doubled after every failure
FIRST_PAUSE = 0.2
LONGEST_PAUSE = 30.0

T = TypeVar("T")
S = TypeVar("S")


class Dispatch(Generic[S, T]):
    """One run of rows over `servers`. `ask(server, row)` answers a row; `check(server)` returns
    when the server is healthy. Both raise Unavailable."""

    def __init__(
        self,
        servers: Sequence[S],
        ask: Callable[[S, int], Awaitable[T]],
        check: Callable[[S], Awaitable[object]],
        max_in_flight: int,
        max_retries: int,
    ) -> None:
        self.servers = servers
        self.ask = ask
        self.check = check
        self.max_in_flight = max_in_flight
        self.max_retries = max_retries
        self.answers: dict[int, T] = {}
        self.attempts: Counter[int] = Counter()  # failures of a row
        self.failures: Counter[int] = Counter()  # failures in a row of a server, by its number
        self.down: dict[int, str] = {}  # servers that get no rows, by number, and why
        self.changed = asyncio.Condition()  # more rows, a server up again, or all rows answered

    async def run(self, chunks: Iterable[Sequence[int]]) -> dict[int, T]:
        """Return the answer to every row. Raises ArtifactError when a row or every server has
        failed too often."""
        self.chunks = deque(deque(chunk) for chunk in chunks if chunk)
        self.num_rows = sum(map(len, self.chunks))
        if self.num_rows and not self.servers:
            raise NoServerError("no server is there")
        self.own: list[deque[int]] = [deque() for _ in self.servers]  # rest of a server's chunk
        try:
            async with asyncio.TaskGroup() as tasks:
                for number in range(len(self.servers)):
                    tasks.create_task(self.poll(number))
                    for _ in range(min(self.max_in_flight, self.num_rows)):
                        tasks.create_task(self.work(number))
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
        return self.answers

    def is_done(self) -> bool:
        return len(self.answers) == self.num_rows

    async def work(self, number: int) -> None:
        """Answer rows through one server, one at a time, until all rows are answered."""
        while (row := await self.assign(number)) is not None:
            try:
                self.answers[row] = await self.ask(self.servers[number], row)
            except Unavailable as error:
                await self.on_failure(number, row, error)
                continue
            self.failures[number] = 0
            if self.is_done():
                await self.notify()

    async def assign(self, number: int) -> int | None:
        """Return the next row for a server; None when all rows are answered. Waits while the server
        is down or other servers hold all the rows that are left."""
        async with self.changed:
            while True:
                if self.is_done():
                    return None
                if number not in self.down:
                    if not self.own[number] and self.chunks:
                        self.own[number] = self.chunks.popleft()
                    if self.own[number]:
                        return self.own[number].popleft()
                await self.changed.wait()

    async def on_failure(self, number: int, row: int, error: Unavailable) -> None:
        """Mark the server as down, and put the row and the rest of the server's chunk back into the
        queue."""
        self.attempts[row] += 1
        if self.attempts[row] > self.max_retries:
            raise ArtifactError(
                f"a completion failed {self.attempts[row]} times; the last failure: {error}"
            )
        self.chunks.appendleft(deque([row]))
        if self.own[number]:
            self.chunks.appendleft(self.own[number])
            self.own[number] = deque()
        if number not in self.down:  # only the first of the rows that it had in flight counts
            self.mark_down(number, str(error))
            logger.warning("%s; other servers take its rows until it is healthy again", error)
        await self.notify()

    def mark_down(self, number: int, why: str) -> None:
        """Assign no rows to a server until it has passed a health check."""
        self.failures[number] += 1
        self.down[number] = why

    async def poll(self, number: int) -> None:
        """Whenever the server is down, check its health after a pause, and mark it as up again."""
        while not self.is_done():
            async with self.changed:
                while number not in self.down and not self.is_done():
                    await self.changed.wait()
            await self.pause(number)
            if self.is_done():
                return
            try:
                await self.check(self.servers[number])
            except Unavailable as error:
                self.mark_down(number, str(error))
            else:
                del self.down[number]
                await self.notify()

    async def pause(self, number: int) -> None:
        """Wait before the next health check, no longer than the run lasts. Raises ArtifactError
        when every server has failed too often."""
        lost = [n for n in self.down if self.failures[n] > self.max_retries]
        if len(lost) == len(self.servers):
            raise NoServerError(
                "no server answers: " + "; ".join(self.down[n] for n in sorted(lost))
            )
        seconds = min(FIRST_PAUSE * 2 ** (self.failures[number] - 1), LONGEST_PAUSE)
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds), self.changed:
                await self.changed.wait_for(self.is_done)

    async def notify(self) -> None:
        """Wake every task that waits for a change."""
        async with self.changed:
            self.changed.notify_all()


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
