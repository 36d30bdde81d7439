"""Servers that are lent to trainers outlive them, and no trainer samples from another's weights."""

import os
import signal
import time
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as distributed

from tasks.common.files import ArtifactError
from tasks.engines.server.engine import ServerEngine
from tasks.engines.server.lending import Borrowed, Lender, wait_until_serving
from tasks.engines.server.replicas import MAX_RESTARTS, Replicas
from tasks.engines.trainers import broadcast, others_waiting
from tasks.models.policy import Policy
from tasks.models.weights import NamedWeights
from tests.engines.conftest import (
    FLEET,
    REQUEST,
    Fleet,
    does,
    expected,
    names,
    scaled,
)
from tests.engines.serving import StandIn
from tests.patience import PATIENCE
from tests.stages import FORKS, run_together


def trainer(policy: Policy, lender: Lender, prefix: str) -> ServerEngine:
    lender.reclaim()
    borrowed = Borrowed(lender.folder)
    wait_until_serving(borrowed)
    return ServerEngine(FLEET, policy, borrowed, borrowed.wait_for_one(), prefix)


def test_next_trainer_loads_its_own_weights_before_sampling(fleet: Fleet, policy: Policy) -> None:
    lender = Lender(fleet(True, True))
    first = trainer(policy, lender, "a-")
    first.set_weights(NamedWeights(scaled(policy, 1.0)))
    first.set_weights(NamedWeights(scaled(policy, 1.5)))
    assert first.generate(REQUEST).token_ids == expected(policy, 1.5) != expected(policy, 1.0)

    second = trainer(policy, lender, "b-")
    assert names(second) == ["0-0", "1-0"]  # they were not restarted
    with pytest.raises(ArtifactError, match="sampled from weights of version 'a-2', not ''"):
        second.generate(REQUEST)
    second.set_weights(NamedWeights(scaled(policy, 1.2)))
    assert second.generate(REQUEST).token_ids == expected(policy, 1.2)
    assert lender.replicas.attempts == [0, 0]


def test_interrupted_update_does_not_prevent_the_next_one(fleet: Fleet, policy: Policy) -> None:
    lender = Lender(fleet(True, True, True))
    first = trainer(policy, lender, "a-")
    first.set_weights(NamedWeights(scaled(policy, 1.5)))
    paused, updating, stuck = (does(lender.replicas, place) for place in range(3))
    for each in (paused, updating, stuck):
        each.paused = True
        each.updating = each is not paused
    stuck.finishes = False
    second = trainer(policy, lender, "b-")
    assert [each.paused for each in (paused, updating, stuck)] == [False] * 3
    assert [paused.version, updating.version] == ["a-1", "unfinished"]
    second.set_weights(NamedWeights(scaled(policy, 1.5)))
    assert names(second) == ["0-0", "1-0"]
    lender.tend()
    assert lender.replicas.attempts == [0, 0, 1]  # the server still in the update is restarted
    assert second.generate(REQUEST).token_ids == expected(policy, 1.5)


def test_refused_server_is_restarted_by_the_command(fleet: Fleet, policy: Policy) -> None:
    lender = Lender(fleet(True, True))
    engine = trainer(policy, lender, "a-")
    does(lender.replicas, 1).loads = False  # it only reports the new weights
    engine.set_weights(NamedWeights(scaled(policy, 1.5)))
    assert names(engine) == ["0-0"]
    lender.tend()
    assert lender.replicas.attempts == [0, 1]
    assert engine.generate(REQUEST).token_ids == expected(policy, 1.5)
    assert names(engine) == ["0-0", "1-1"]


def test_server_that_does_not_start_ends_the_command_with_its_log(tmp_path: Path) -> None:
    lender = Lender(Replicas(lambda *_: StandIn(None, "0-0"), 1, tmp_path, ExitStack()))
    with pytest.raises(ArtifactError, match=r"started here ended; the end of its log:\nout of mem"):
        lender.tend()


def test_command_ends_after_too_many_restarts(fleet: Fleet) -> None:
    lender = Lender(fleet(True))
    lender.tend()
    for _ in range(MAX_RESTARTS + 1):
        lender.replicas.replicas[0].end()
        lender.replicas.revive()
    lender.tend()
    with pytest.raises(ArtifactError, match=f"ended {MAX_RESTARTS + 1} times"):
        lender.reclaim()


LIMIT = timedelta(seconds=4)


def wait_for_a_server(rank: int, meeting: str, hangs: bool) -> None:
    """Wait longer than a collective may take, or hang, if this is the first of two processes."""
    distributed.init_process_group(
        "gloo", init_method=meeting, rank=rank, world_size=2, timeout=LIMIT
    )
    with others_waiting():
        if rank == 0 and hangs:
            time.sleep(LIMIT.total_seconds() / 2)
            os.kill(os.getpid(), signal.SIGSTOP)
        elif rank == 0:
            time.sleep(2 * LIMIT.total_seconds())
    assert broadcast(f"what rank {rank} has", is_patient=True) == "what rank 0 has"
    distributed.destroy_process_group()


def test_slow_start_of_a_server_is_no_timeout(tmp_path: Path) -> None:
    meeting = f"file://{tmp_path}/meeting"
    run_together(wait_for_a_server, [(rank, meeting, False) for rank in range(2)])


def test_first_process_that_hangs_is_noticed(tmp_path: Path) -> None:
    first, second = (
        FORKS.Process(target=wait_for_a_server, args=(rank, f"file://{tmp_path}/meeting", True))
        for rank in range(2)
    )
    try:
        first.start()
        second.start()
        second.join(PATIENCE)
        assert second.exitcode == 1
        assert first.is_alive()
    finally:
        first.kill()
