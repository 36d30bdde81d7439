"""New weights: servers that fail to load them are replaced, and answer no request."""

import dataclasses
from typing import Any

import pytest
import torch

from tasks.common.files import ArtifactError
from tasks.engines.engine import NoServerError
from tasks.engines.server.engine import ServerEngine
from tasks.engines.server.replicas import Replicas
from tasks.engines.weights.files import FileTransfer
from tasks.models.policy import Policy
from tasks.models.weights import NamedWeights
from tests.engines.conftest import FLEET, REQUEST, Fleet, does, expected, names, scaled


def engine_of(replicas: Replicas, policy: Policy) -> ServerEngine:
    return ServerEngine(FLEET, policy, replicas, replicas.serving())


def dropped(replicas: Replicas) -> list[str]:
    return sorted(endpoint.name for endpoint in replicas.dropped)


def test_server_that_keeps_its_old_weights_is_replaced(fleet: Fleet, policy: Policy) -> None:
    servers = fleet(False, True, True)
    engine = engine_of(servers, policy)
    assert engine.generate(REQUEST).token_ids == expected(policy, 1.0)
    engine.set_weights(NamedWeights(scaled(policy, 1.5)))
    assert dropped(servers) == ["0-0"]  # the others agree
    assert names(engine) == ["1-0", "2-0"]
    new = expected(policy, 1.5)
    assert engine.generate(REQUEST).token_ids == new != expected(policy, 1.0)
    assert names(engine) == ["1-0", "2-0", "0-1"]
    does(servers, 1).fault = does(servers, 2).fault = lambda number: 503  # the new one answers all
    assert engine.generate(REQUEST).token_ids == new


def test_run_ends_if_no_server_accepts_the_first_weights(fleet: Fleet, policy: Policy) -> None:
    """Restarted servers would not accept them either."""
    servers = fleet(True, True)
    engine = engine_of(servers, policy)
    for place in (0, 1):
        does(servers, place).takes = False
    with pytest.raises(
        ArtifactError,
        match="no vLLM server accepts new weights of this policy.*set engine.name to hf"
        ".*There is no module named 'experts'",
    ):
        engine.set_weights(NamedWeights(scaled(policy, 1.0)))
    assert servers.attempts == [0, 0]


def test_restarted_server_gets_the_current_weights(fleet: Fleet, policy: Policy) -> None:
    servers = fleet(True)
    engine = engine_of(servers, policy)
    engine.set_weights(NamedWeights(scaled(policy, 1.5)))
    does(servers, 0).fault = lambda number: 503  # it is healthy, but rejects all requests
    assert engine.generate(REQUEST).token_ids == expected(policy, 1.5)
    assert dropped(servers) == ["0-0"]
    assert does(servers, 0).version == engine.versions.current == "1"


def test_restarted_server_gets_no_request_of_other_ranks(fleet: Fleet, policy: Policy) -> None:
    """Other ranks cannot load weights into it. They recognize it by its version."""
    servers = fleet(True)
    engine = engine_of(servers, policy)
    engine.set_weights(NamedWeights(scaled(policy, 1.5)))
    engine.loading, engine.models = None, {}
    does(servers, 0).version = "default"
    before = does(servers, 0).served
    with pytest.raises(NoServerError, match="weights of version 'default', not '1'"):
        engine.generate(REQUEST)
    probes = does(servers, 0).prompts[before:]
    assert not set(probes) & set(map(tuple, REQUEST.prompts))


def test_swap_ends_servers_without_the_new_weights(fleet: Fleet, policy: Policy) -> None:
    servers = fleet(True, False)
    engine = engine_of(servers, policy)
    engine.set_weights(NamedWeights(scaled(policy, 1.0)), 3)
    assert dropped(servers) == []  # the weights have not changed
    engine.swap_weights(NamedWeights(scaled(policy, 1.5)), 4)
    assert dropped(servers) == ["1-0"]
    samples = engine.generate(REQUEST)
    assert samples.token_ids == expected(policy, 1.5)
    assert samples.versions == [[4] * len(ids) for ids in samples.token_ids]
    assert names(engine) == ["0-0", "1-1"]

    # weights that all servers have are not sent again
    updates = engine.versions.num_updates
    engine.set_weights(NamedWeights(scaled(policy, 1.5)), 4)
    assert engine.versions.num_updates == updates
    assert engine.versions.known == {engine.versions.current: 4}
    servers.drop(engine.endpoints[1])
    engine.set_weights(NamedWeights(scaled(policy, 1.5)), 4)
    assert engine.versions.num_updates == updates + 1
    assert engine.generate(REQUEST).token_ids == samples.token_ids


class Once(FileTransfer):
    """A transfer that fails once for all servers, and cannot be repeated later."""

    repeats, num_failures = False, 1

    async def send(self, connections: Any) -> list[str | None]:
        if self.num_failures:
            self.num_failures -= 1
            return ["the group has ended"] * len(connections)
        return await super().send(connections)


def test_swap_that_fails_for_all_continues_with_restarted_servers(
    fleet: Fleet, policy: Policy
) -> None:
    servers = fleet(True, True)
    engine = engine_of(servers, policy)
    assert engine.loading is not None
    engine.set_weights(NamedWeights(scaled(policy, 1.0)), 0)
    folder = servers.folder / "weights"
    engine.transfer = engine.loading.transfer = Once(folder, policy.folder, torch.float32)
    before = list(engine.endpoints)
    engine.swap_weights(NamedWeights(scaled(policy, 1.5)), 1)
    assert dropped(servers) == ["0-0", "1-0"]
    assert names(engine) == ["0-1", "1-1"]
    assert engine.generate(REQUEST).token_ids == expected(policy, 1.5)

    # a sampler used the previous servers while the swap waited for others
    others, complete, num_calls = engine.endpoints, engine.complete, 0

    async def gone_at_first(*arguments: Any) -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 1:
            engine.endpoints = others
            raise NoServerError("no server answers")
        await complete(*arguments)

    engine.endpoints, engine.complete = before, gone_at_first  # type: ignore[method-assign]
    assert engine.generate(REQUEST).token_ids == expected(policy, 1.5)
    assert num_calls == 2


def test_paused_servers_are_ended_if_the_trainer_fails(fleet: Fleet, policy: Policy) -> None:
    servers = fleet(True, True)
    engine = engine_of(servers, policy)
    assert engine.loading is not None

    async def out_of_memory(connections: Any) -> list[str | None]:
        raise torch.OutOfMemoryError("on the trainer's GPU")

    engine.loading.transfer.send = out_of_memory  # type: ignore[method-assign]
    with pytest.raises(torch.OutOfMemoryError):
        engine.swap_weights(NamedWeights(scaled(policy, 1.5)), 1)
    assert dropped(servers) == ["0-0", "1-0"]


def test_answers_to_a_probe_are_compared(fleet: Fleet, policy: Policy) -> None:
    """Servers of a diverged policy agree: the trainer notices it."""
    engine = engine_of(fleet(True, True), policy)
    assert engine.loading is not None
    one = engine.loading.probe
    assert one is not None
    nan = dataclasses.replace(one, logprobs=[float("nan")] * len(one.logprobs))
    assert engine.identity.agrees(one, one)
    assert engine.identity.agrees(nan, nan)
    assert not engine.identity.agrees(nan, one)
    other = dataclasses.replace(one, logprobs=[value - 0.1 for value in one.logprobs])
    assert not engine.identity.agrees(other, one)
    shorter = dataclasses.replace(one, token_ids=[*one.token_ids[:2], 90, 90])
    assert engine.identity.agrees(shorter, one)
