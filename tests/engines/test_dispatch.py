"""The assignment of rows to servers, also if a server hangs."""

import asyncio
import time
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest

from tasks.engines.engine import Unavailable
from tasks.engines.server.dispatch import MAX_MISSED, Dispatch, chunked
from tasks.engines.server.endpoints import Endpoint
from tasks.engines.server.engine import from_own_first
from tests.parameters import every_value

MAX_ROWS = every_value()["engine"]["max_rows"]


class Servers:
    """Numbered servers, which answer a row with itself. Those in `hang` do not answer."""

    def __init__(self, num: int, hang: Sequence[int] = ()) -> None:
        self.num, self.hang = num, set(hang)
        self.requests: list[tuple[int, int]] = []  # server and row, in order
        self.in_flight: Counter[int] = Counter()  # of each row
        self.given_up: list[int] = []
        self.beats = 0  # of all servers

    async def ask(self, server: int, row: int) -> int:
        self.requests.append((server, row))
        self.in_flight[row] += 1
        assert self.in_flight[row] == 1
        try:
            if server in self.hang:
                await asyncio.Event().wait()
            await asyncio.sleep(0)
        finally:
            self.in_flight[row] -= 1
        return row

    async def is_alive(self, server: int) -> bool:
        if server in self.hang:
            await asyncio.Event().wait()
        return True

    def give_up(self, server: int) -> str:
        self.given_up.append(server)
        return f"server {server}"

    def run(self, counts: Sequence[int], **settings: Any) -> dict[int, int]:
        chosen = {"max_in_flight": MAX_ROWS, "max_retries": 2, "beat_seconds": 0.05, **settings}
        functions = (self.ask, self.is_alive, self.is_alive, self.give_up)
        dispatch = Dispatch[int, int](list(range(self.num)), *functions, **chosen)  # type: ignore[arg-type]
        answers = asyncio.run(dispatch.run(chunked(counts, chosen["max_in_flight"])))
        assert answers == {row: row for row in range(sum(counts))}
        return answers

    def rows(self) -> list[int]:
        found = Counter(server for server, _ in self.requests)
        return [found[server] for server in range(self.num)]


@pytest.mark.parametrize(
    ("num", "counts", "rows"),
    [
        (3, [8] * 8, [24, 24, 16]),
        (3, [6, 2, 0, 2, 2, 2], [6, 4, 4]),
    ],
)
def test_group_goes_to_the_server_with_the_fewest_rows_in_flight(
    num: int, counts: list[int], rows: list[int]
) -> None:
    servers = Servers(num)
    servers.run(counts)
    assert servers.rows() == rows


def test_group_larger_than_a_servers_room_stays_together() -> None:
    servers = Servers(2)
    servers.run([4] * 6, max_in_flight=3)
    homes = {row: server for server, row in servers.requests}
    groups = [range(first, first + 4) for first in range(0, 24, 4)]
    # a group of four is split after the three rows that a server admits at once
    assert all(len({homes[row] for row in group[:3]}) == 1 for group in groups)
    assert any(homes[group[3]] != homes[group[0]] for group in groups)


def test_trainers_start_at_different_servers() -> None:
    servers = [Endpoint(f"http://{number}/v1") for number in range(6)]
    orders = [from_own_first(servers, rank, 3) for rank in range(3)]
    assert [order[0] for order in orders] == [servers[0], servers[2], servers[4]]
    assert orders[1] == [*servers[2:], *servers[:2]]
    more = [from_own_first(servers[:2], rank, 4)[0] for rank in range(4)]
    assert more == [servers[0], servers[0], servers[1], servers[1]]


def test_rows_of_a_hanging_server_are_moved_to_the_others() -> None:
    servers = Servers(64, hang=[7])
    servers.run([8] * 512)
    assert servers.given_up == [7]
    requests = Counter(row for _, row in servers.requests)
    moved = {row for server, row in servers.requests if server == 7}
    assert len(moved) == 64
    assert requests == {row: 2 if row in moved else 1 for row in range(4096)}


def test_run_ends_when_all_rows_are_answered() -> None:
    """A server fails and then hangs: its health check would never end."""

    class Failing(Servers):
        async def ask(self, server: int, row: int) -> int:
            if server == 0:
                self.hang.add(0)
                raise Unavailable("server 0 is not there")
            await asyncio.sleep(1.0)  # the pause before the check has passed
            return row

    servers = Failing(2)
    servers.run([1] * 4, beat_seconds=600.0)
    assert servers.given_up == []


def test_late_heartbeats_count() -> None:
    """Every answer to a probe takes almost as long as is allowed, and a row takes longer."""

    class Late(Servers):
        async def is_alive(self, server: int) -> bool:
            self.beats += 1
            begun = self.beats
            while self.beats < begun + MAX_MISSED - 1:
                await asyncio.sleep(0)
            return True

        async def ask(self, server: int, row: int) -> int:
            while self.beats < 5 * MAX_MISSED:
                await asyncio.sleep(0)
            return row

    servers = Late(1)
    servers.run([2], beat_seconds=0.01)
    assert servers.given_up == []


def test_busy_client_misses_no_heartbeat() -> None:
    """This process is repeatedly busy for longer than a server may be silent."""

    class Busy(Servers):
        async def ask(self, server: int, row: int) -> int:
            for _ in range(3):
                time.sleep(5 * MAX_MISSED * 0.01)
                await asyncio.sleep(0.001)
            return row

        async def is_alive(self, server: int) -> bool:
            for _ in range(3):  # reading an answer takes some turns of the loop
                await asyncio.sleep(0)
            return True

    servers = Busy(2)
    servers.run([1] * 4, beat_seconds=0.01)
    assert servers.given_up == []
