"""Servers outlive the trainers that they are lent to, and no trainer samples from the weights of
the one before."""

import dataclasses
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as distributed

from tasks.common.files import ArtifactError
from tasks.engines.engine import Request
from tasks.engines.hf.engine import HfEngine
from tasks.engines.server.askers import agree, keep_waiting
from tasks.engines.server.endpoints import Endpoint
from tasks.engines.server.engine import ServerEngine
from tasks.engines.server.lending import Borrowed, Lender
from tasks.engines.server.replicas import MAX_RESTARTS, Replicas
from tasks.engines.settings import Sampling
from tasks.models.policy import Policy
from tasks.models.weights import NamedWeights
from tests.engines.conftest import scaled
from tests.engines.serving import Server
from tests.policies import ENGINE
from tests.stages import FORKS

SETTINGS = dataclasses.replace(ENGINE, name="server", max_rows=4, max_retries=1)
REQUEST = Request(
    [[20, 14, 20, 3, 32], [21, 14, 22]], [3, 3], range(6), Sampling(0.8, 1.0, 0, 6, 0)
)


class Stub:
    """A server in the place of one of vLLM. One that `fails` ends before it answers."""

    def __init__(self, server: Server | None, name: str, *, fails: bool = False) -> None:
        self.server, self.fails = server, fails
        self.endpoint = Endpoint(server.url if server else "", name=name, key="k")
        self.is_gone = False

    def is_serving(self) -> bool:
        return not (self.is_gone or self.fails)

    def has_ended(self) -> bool:
        return self.is_gone or self.fails

    def was_lost(self) -> bool:
        return False

    def log_tail(self) -> str:
        return "out of memory"

    def end(self) -> None:
        if self.server is not None and self.server.thread.is_alive() and not self.is_gone:
            self.server.stop()
        self.is_gone = True

    def wait(self) -> None:
        pass


Lend = Callable[..., Lender]


@pytest.fixture
def lend(policy: Policy, tmp_path: Path) -> Iterator[Lend]:
    """Lends `num` servers of the policy, or some that fail."""
    with ExitStack() as stack:

        def start(place: int, attempt: int) -> Stub:
            engine = HfEngine(scaled(policy, 1.0), [1], 8, 512)
            server = stack.enter_context(Server(engine, [policy.digest]))
            return Stub(server, f"{place}-{attempt}")

        yield lambda num, start=start: Lender(Replicas(start, num, tmp_path, ExitStack()))


def trainer(policy: Policy, lender: Lender, prefix: str) -> ServerEngine:
    """The engine of a trainer that has just been started."""
    lender.take_back()
    borrowed = Borrowed(lender.folder, lender.tend)
    borrowed.wait_until_serving()
    return ServerEngine(SETTINGS, policy, borrowed, borrowed.wait_for_one(), prefix)


def expected(policy: Policy, factor: float) -> Any:
    return HfEngine(scaled(policy, factor), [1], 8, 512).generate(REQUEST).token_ids


def names(engine: ServerEngine) -> list[str]:
    return [endpoint.name for endpoint in engine.endpoints]


def test_the_next_trainer_gives_the_servers_its_own_weights_before_it_samples(
    lend: Lend, policy: Policy
) -> None:
    lender = lend(2)
    first = trainer(policy, lender, "a-")
    first.set_weights(NamedWeights(scaled(policy, 1.0)))
    first.set_weights(NamedWeights(scaled(policy, 1.5)))
    assert first.generate(REQUEST).token_ids == expected(policy, 1.5) != expected(policy, 1.0)

    second = trainer(policy, lender, "b-")
    assert names(second) == ["0-0", "1-0"]  # they were not started again
    with pytest.raises(ArtifactError, match="sampled from weights of version 'a-2', not ''"):
        second.generate(REQUEST)
    second.set_weights(NamedWeights(scaled(policy, 1.2)))
    assert second.generate(REQUEST).token_ids == expected(policy, 1.2)
    assert lender.replicas.attempts == [0, 0]


def test_servers_that_were_left_in_the_middle_of_an_update_get_the_next_one(
    lend: Lend, policy: Policy
) -> None:
    lender = lend(3)
    first = trainer(policy, lender, "a-")
    first.set_weights(NamedWeights(scaled(policy, 1.5)))
    servers = [stub.server for stub in lender.replicas.replicas]  # type: ignore[attr-defined]
    paused, updating, stuck = (server.does for server in servers)
    for does in (paused, updating, stuck):
        does.paused = True
        does.updating = does is not paused
    stuck.finishes = False
    second = trainer(policy, lender, "b-")
    assert [does.paused for does in (paused, updating, stuck)] == [False] * 3
    assert [paused.version, updating.version] == ["a-1", "unfinished"]
    second.set_weights(NamedWeights(scaled(policy, 1.5)))
    assert names(second) == ["0-0", "1-0"]
    lender.tend()
    assert lender.replicas.attempts == [0, 0, 1]  # the one that stays in it is started again
    assert second.generate(REQUEST).token_ids == expected(policy, 1.5)


def test_a_server_that_a_trainer_refuses_is_ended_by_the_command(
    lend: Lend, policy: Policy
) -> None:
    lender = lend(2)
    engine = trainer(policy, lender, "a-")
    server = lender.replicas.replicas[1].server  # type: ignore[attr-defined]
    server.does.loads = False  # it only says that it has the new weights
    engine.set_weights(NamedWeights(scaled(policy, 1.5)))
    assert names(engine) == ["0-0"]
    lender.tend()
    assert lender.replicas.attempts == [0, 1]
    assert engine.generate(REQUEST).token_ids == expected(policy, 1.5)
    assert names(engine) == ["0-0", "1-1"]


def test_a_server_that_does_not_start_ends_the_command_with_its_log(lend: Lend) -> None:
    lender = lend(1, lambda place, attempt: Stub(None, f"{place}-{attempt}", fails=True))
    with pytest.raises(ArtifactError, match=r"started here ended; the end of its log:\nout of mem"):
        lender.tend()


def test_when_all_servers_have_ended_too_often_the_command_ends(lend: Lend, policy: Policy) -> None:
    lender = lend(1)
    lender.tend()
    for _ in range(MAX_RESTARTS + 1):
        lender.replicas.replicas[0].end()
        lender.replicas.revive()
    lender.tend()
    with pytest.raises(ArtifactError, match=f"ended {MAX_RESTARTS + 1} times"):
        lender.take_back()


LIMIT = timedelta(seconds=2)


def wait_for_a_server(rank: int, meeting: str) -> None:
    """The first of two processes waits for a server for longer than a collective may take."""
    distributed.init_process_group(
        "gloo", init_method=meeting, rank=rank, world_size=2, timeout=LIMIT
    )
    deadline = time.monotonic() + 3 * LIMIT.total_seconds()
    while rank == 0 and time.monotonic() < deadline:
        keep_waiting()
        time.sleep(0.1)
    assert agree(f"what rank {rank} has") == "what rank 0 has"
    distributed.destroy_process_group()


def test_the_start_of_a_server_does_not_count_as_silence(tmp_path: Path) -> None:
    arguments = [(rank, f"file://{tmp_path}/meeting") for rank in range(2)]
    ranks = [FORKS.Process(target=wait_for_a_server, args=each) for each in arguments]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    assert [process.exitcode for process in ranks] == [0, 0]
