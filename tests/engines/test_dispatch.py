"""Which server gets which rows, and what becomes of the rows of one that hangs."""

import asyncio
import copy
import dataclasses
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import pytest

from tasks.engines.engine import Request, Unavailable
from tasks.engines.fake import FakeEngine
from tasks.engines.server.dispatch import MAX_MISSED, Dispatch, chunked
from tasks.engines.server.endpoints import Endpoint
from tasks.engines.server.engine import ServerEngine, from_own_first
from tasks.engines.settings import Sampling
from tasks.models.policy import Policy
from tests.engines.serving import Server
from tests.parameters import every_value
from tests.policies import ENGINE

MAX_ROWS = every_value()["engine"]["max_rows"]
NUM_SERVERS = 64


class Servers:
    """Servers by number, all of which answer a row with itself. Those that `hang` answer
    nothing."""

    def __init__(self, num: int, hang: Sequence[int] = ()) -> None:
        self.num, self.hang = num, set(hang)
        self.asked: list[tuple[int, int]] = []  # server and row, in order
        self.in_flight: Counter[int] = Counter()  # of each row
        self.given_up: list[int] = []
        self.beats = 0  # of all servers

    async def ask(self, server: int, row: int) -> int:
        self.asked.append((server, row))
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

    async def check(self, server: int) -> None:
        if server in self.hang:
            await asyncio.Event().wait()

    def give_up(self, server: int) -> str:
        self.given_up.append(server)
        return f"server {server}"

    def run(self, counts: Sequence[int], **settings: Any) -> dict[int, int]:
        """The answers to groups of so many rows."""
        chosen = {"max_in_flight": MAX_ROWS, "max_retries": 2, "beat_seconds": 0.05, **settings}
        functions = (self.ask, self.check, self.is_alive, self.give_up)
        dispatch = Dispatch[int, int](list(range(self.num)), *functions, **chosen)  # type: ignore[arg-type]
        answers = asyncio.run(dispatch.run(chunked(counts, chosen["max_in_flight"])))
        assert answers == {row: row for row in range(sum(counts))}
        return answers

    def rows(self) -> list[int]:
        """How many rows each server was asked for."""
        found = Counter(server for server, _ in self.asked)
        return [found[server] for server in range(self.num)]


def is_even(rows: Sequence[int]) -> bool:
    """Whether every server has its share, give or take a tenth."""
    even = sum(rows) / len(rows)
    return all(0.9 * even <= each <= 1.1 * even for each in rows)


@pytest.mark.parametrize(
    ("num", "counts", "rows"),
    [
        (3, [8] * 8, [24, 24, 16]),
        (3, [4] * 3, [4, 4, 4]),
        (3, [6, 2, 2, 2, 2], [6, 4, 4]),
        (2, [1] * 5, [3, 2]),
    ],
)
def test_a_group_goes_to_the_server_with_the_least_in_flight(
    num: int, counts: list[int], rows: list[int]
) -> None:
    servers = Servers(num)
    servers.run(counts)
    assert servers.rows() == rows


@pytest.mark.parametrize("counts", [[8] * 512, [8, 4, 12, 8] * 256, [16] * 1024])
def test_rows_are_spread_evenly_over_many_servers(counts: list[int]) -> None:
    servers = Servers(NUM_SERVERS)
    servers.run(counts)
    assert is_even(servers.rows())


def test_a_group_stays_together_where_a_server_has_no_room_for_all_of_it() -> None:
    servers = Servers(2)
    servers.run([4] * 6, max_in_flight=3)
    homes = {row: server for server, row in servers.asked}
    groups = [range(first, first + 4) for first in range(0, 24, 4)]
    # a group of four is cut at the three that a server takes at once
    assert all(len({homes[row] for row in group[:3]}) == 1 for group in groups)


def test_trainers_start_at_different_servers() -> None:
    servers = [Endpoint(f"http://{number}/v1") for number in range(6)]
    orders = [from_own_first(servers, rank, 3) for rank in range(3)]
    assert [order[0] for order in orders] == [servers[0], servers[2], servers[4]]
    assert orders[1] == [*servers[2:], *servers[:2]]
    more = [from_own_first(servers[:2], rank, 4)[0] for rank in range(4)]
    assert more == [servers[0], servers[0], servers[1], servers[1]]


def test_the_rows_of_a_server_that_hangs_are_moved_to_the_others() -> None:
    servers = Servers(NUM_SERVERS, hang=[7])
    servers.run([8] * 512)
    assert servers.given_up == [7]
    asked = Counter(row for _, row in servers.asked)
    moved = {row for server, row in servers.asked if server == 7}
    assert len(moved) == 64
    assert asked == {row: 2 if row in moved else 1 for row in range(4096)}


def test_nothing_is_waited_for_once_all_rows_are_answered() -> None:
    """One server fails at once and then hangs: its check would last for ever."""

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


def test_a_late_sign_of_life_is_one() -> None:
    """It takes almost as long as a server may, again and again, while a row takes longer."""

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


def test_what_this_process_could_not_hear_does_not_count_against_a_server() -> None:
    """It is busy for longer than a server may be silent, over and over."""

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
    servers.run([1] * 8, beat_seconds=0.01)
    assert servers.given_up == []


@pytest.fixture
def stubs(policy: Policy) -> Iterator[list[Server]]:
    engine = FakeEngine(policy)
    with ExitStack() as stack:
        yield [
            stack.enter_context(Server(copy.copy(engine), [policy.digest]))  # type: ignore[arg-type]
            for _ in range(NUM_SERVERS)
        ]


def test_one_of_many_servers_hangs_and_no_request_is_waited_for(
    policy: Policy, stubs: list[Server], caplog: pytest.LogCaptureFixture
) -> None:
    settings = dataclasses.replace(
        ENGINE, name="server", max_rows=MAX_ROWS, timeout_seconds=600.0, max_retries=8
    )
    started = [Endpoint(server.url, key="k") for server in stubs]
    engine = ServerEngine(settings, policy, None, started)
    sampling = Sampling(temperature=1.0, top_p=1.0, top_k=0, max_tokens=4, seed=0)
    prompts = [[3 + row % 90, 14, 20] for row in range(2 * NUM_SERVERS)]
    request = Request(prompts, [5] * len(prompts), range(5 * len(prompts)), sampling)

    before = [server.does.served for server in stubs]
    whole = engine.generate(request)
    served = [server.does.served for server in stubs]
    assert is_even([now - then for now, then in zip(served, before, strict=True)])

    stubs[7].does.hangs = True
    engine.beat_seconds = 1.0  # type: ignore[misc]
    began = time.monotonic()
    assert engine.generate(request).token_ids == whole.token_ids
    assert time.monotonic() - began < settings.timeout_seconds
    assert f"{stubs[7].url} sent no heartbeat for 3 s; other servers take its rows" in caplog.text
