"""Work handed out to servers that may fail: who is free takes the next chunk, who fails gives its
work back.

A chunk is rows that are best answered by one server (samples of one prompt, which it then reads
once). A server that fails is left alone for a while, longer each time, and asked whether it is well
before it gets work again. A row, and a server, may fail `max_retries` times in a row; then the
whole work ends with an error that names what happened where."""

import asyncio
import logging
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from typing import Generic, TypeVar

from tasks.common.files import ArtifactError

logger = logging.getLogger(__name__)

FIRST_PAUSE, LONGEST_PAUSE = (
    0.2,
    30.0,
)  # seconds before a server that failed is asked again; doubled each time

T = TypeVar("T")
S = TypeVar("S")


class Unavailable(Exception):
    """A server did not answer, or asked for patience: another, or the same one later, may
    answer."""


class Dispatch(Generic[S, T]):
    """One piece of work over `servers`. `ask(server, row)` answers a row; `probe(server)` returns
    when it is well."""

    def __init__(
        self,
        servers: Sequence[S],
        ask: Callable[[S, int], Awaitable[T]],
        probe: Callable[[S], Awaitable[None]],
        max_in_flight: int,
        max_retries: int,
        on_finished: Callable[[int], object] | None = None,
    ) -> None:
        self.servers, self.ask, self.probe = servers, ask, probe
        self.max_in_flight, self.max_retries, self.on_finished = (
            max_in_flight,
            max_retries,
            on_finished,
        )
        self.answers: dict[int, T] = {}
        self.attempts: Counter[int] = Counter()
        self.down: dict[int, str] = {}  # servers that are left alone, by number, and why
        self.failures: Counter[int] = Counter()  # of a server, in a row
        self.changed = asyncio.Condition()  # more work, a server well again, or all done

    async def run(self, chunks: Iterable[Sequence[int]]) -> dict[int, T]:
        """The answer to every row. Raises ArtifactError when a row or every server has failed too
        often."""
        self.chunks = deque(deque(chunk) for chunk in chunks if chunk)
        self.num_rows = sum(map(len, self.chunks))
        self.own: list[deque[int]] = [deque() for _ in self.servers]
        try:
            async with asyncio.TaskGroup() as tasks:
                for number in range(len(self.servers)):
                    tasks.create_task(self.look_after(number))
                    for _ in range(min(self.max_in_flight, self.num_rows)):
                        tasks.create_task(self.work(number))
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None
        return self.answers

    def set_down(self, number: int, why: str) -> None:
        """Leave a server alone until it has been asked whether it is well."""
        self.failures[number] += 1
        self.down[number] = why

    def is_done(self) -> bool:
        return len(self.answers) == self.num_rows

    async def work(self, number: int) -> None:
        """Answer rows through one server, one at a time, until there are none left anywhere."""
        while (row := await self.take(number)) is not None:
            try:
                self.answers[row] = await self.ask(self.servers[number], row)
            except Unavailable as error:
                await self.give_back(number, row, error)
                continue
            self.failures[number] = 0
            if self.on_finished:
                self.on_finished(1)
            if self.is_done():
                await self.tell()

    async def take(self, number: int) -> int | None:
        """The next row for a server; None at the end. Waits while it is down or others hold all
        that is left."""
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

    async def give_back(self, number: int, row: int, error: Unavailable) -> None:
        """Leave the server alone, and let any other take the row and what the server had before
        it."""
        self.attempts[row] += 1
        if self.attempts[row] > self.max_retries:
            raise ArtifactError(f"a completion failed {self.attempts[row]} times, at last: {error}")
        self.chunks.appendleft(deque([row]))
        if self.own[number]:
            self.chunks.appendleft(self.own[number])
            self.own[number] = deque()
        if number not in self.down:
            self.set_down(number, str(error))
            logger.warning("%s; its work goes to the others until it is well again", error)
        await self.tell()

    async def look_after(self, number: int) -> None:
        """Whenever the server is down: wait, ask whether it is well, and let it work again."""
        while not self.is_done():
            async with self.changed:
                while number not in self.down and not self.is_done():
                    await self.changed.wait()
            await self.pause(number)
            if self.is_done():
                return
            try:
                await self.probe(self.servers[number])
            except Unavailable as error:
                self.set_down(number, str(error))
            else:
                del self.down[number]
                await self.tell()

    async def pause(self, number: int) -> None:
        """Wait before a server is asked again, no longer than the work lasts. ArtifactError when
        all are lost."""
        lost = [n for n in self.down if self.failures[n] > self.max_retries]
        if len(lost) == len(self.servers):
            raise ArtifactError(
                "no server answers: " + "; ".join(self.down[n] for n in sorted(lost))
            )
        seconds = min(FIRST_PAUSE * 2 ** (self.failures[number] - 1), LONGEST_PAUSE)
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds), self.changed:
                await self.changed.wait_for(self.is_done)

    async def tell(self) -> None:
        async with self.changed:
            self.changed.notify_all()


def chunked(counts: Iterable[int], size: int) -> list[list[int]]:
    """Row numbers of groups of `counts` rows, in order, cut into chunks of one group and at most
    `size` rows."""
    chunks, start = [], 0
    for count in counts:
        rows = range(start, start + count)
        chunks += [list(rows[first : first + size]) for first in range(0, count, size)]
        start += count
    return chunks
