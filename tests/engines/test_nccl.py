"""New weights by vLLM's backend `nccl`, with files in place of NCCL, which needs GPUs."""

import asyncio
import dataclasses
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tasks.common.params import ParamsError
from tasks.engines.engine import Unavailable
from tasks.engines.loading import load_engine
from tasks.engines.server import engine as server_engine
from tasks.engines.server import transfer
from tasks.engines.server.endpoints import Endpoint
from tasks.engines.server.engine import ServerEngine
from tasks.engines.server.updates import check_transfer
from tasks.engines.weights import nccl
from tasks.models.policy import Policy
from tasks.models.weights import NamedWeights
from tests.engines.conftest import REQUEST, SETTINGS, logprob_gaps, scaled
from tests.engines.group import FOLDER, FileGroup


@pytest.mark.vllm
@pytest.mark.slow
def test_servers_sample_with_broadcast_weights(
    policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path))
    monkeypatch.setattr(nccl, "make_id", lambda: os.urandom(128))
    monkeypatch.setattr(nccl, "join", lambda unique_id, size: FileGroup(unique_id, 0, size))
    monkeypatch.setattr(server_engine, "check_transfer", lambda *_: None)
    monkeypatch.setitem(transfer.EXTENSIONS, "nccl", "tests.engines.group.Extension")
    settings = dataclasses.replace(SETTINGS, weight_transfer="nccl", num_replicas=1)
    engine = load_engine(settings, policy, scaled(policy, 1.0))
    assert isinstance(engine, ServerEngine)
    try:
        for factor in (1.3, 1.2):
            model = scaled(policy, factor)
            engine.set_weights(NamedWeights(model))
            gaps = logprob_gaps(model, REQUEST, engine.generate(REQUEST))
            assert max(each.max() for each in gaps) < 1e-4
        assert len(list(tmp_path.iterdir())) == 1  # the group is reused
    finally:
        engine.close()


class Recorder:
    """A connection to a server of the group. It records requests, and fails at a route."""

    def __init__(self, name: str, fails_at: str = "") -> None:
        self.endpoint = Endpoint(f"http://{name}/v1")
        self.fails_at, self.requests = fails_at, list[tuple[str, Any]]()

    async def request(self, method: str, url: str, body: Any = None) -> None:
        route = url.rpartition("/")[2]
        self.requests.append((route, body))
        if route == self.fails_at:
            raise Unavailable(f"{self.endpoint.url} is not there")


class Trainer:
    """The trainer's side of a group."""

    def __init__(self) -> None:
        self.sent: list[torch.Tensor] = []
        self.is_destroyed = False

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        assert src == 0
        self.sent.append(tensor)

    def destroy(self) -> None:
        self.is_destroyed = True


def test_server_that_fails_ends_the_group_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    groups: list[tuple[Trainer, int]] = []

    def join(unique_id: bytes, size: int) -> Trainer:
        groups.append((Trainer(), size))
        return groups[-1][0]

    monkeypatch.setattr(nccl, "make_id", lambda: bytes(128))
    monkeypatch.setattr(nccl, "join", join)
    sender = nccl.NcclTransfer(2, torch.bfloat16, 5.0)
    weights = {"a": torch.randn(3, 2), "b": torch.arange(4)}
    sender.take(weights, "1")
    connections: list[Any] = [Recorder("a"), Recorder("b", fails_at="update_weights")]
    assert asyncio.run(sender.prepare(connections)) == [None, None]
    found = asyncio.run(sender.send(connections))
    assert len(found) == 2
    assert all("http://b/v1 is not there" in (why or "") for why in found)
    assert groups[0][0].is_destroyed
    assert groups[0][1] == 5
    assert [connection.requests[0][0] for connection in connections] == [nccl.LEAVE] * 2
    offsets = [connection.requests[1][1]["init_info"]["rank_offset"] for connection in connections]
    assert offsets == [1, 3]

    # the next servers form another group, and get all weights
    connections = [Recorder("c")]
    assert asyncio.run(sender.prepare(connections)) == [None]
    assert asyncio.run(sender.send(connections)) == [None]
    group, size = groups[1]
    assert size == 3
    assert [tensor.dtype for tensor in group.sent] == [torch.bfloat16, torch.int64]
    torch.testing.assert_close(group.sent[0], weights["a"].to(torch.bfloat16))
    [_, _, (route, body)] = connections[0].requests
    assert route == "update_weights"
    assert body["update_info"] == {
        "names": ["a", "b"],
        "dtype_names": ["bfloat16", "int64"],
        "shapes": [[3, 2], [4]],
    }


def test_broadcast_without_receivers_times_out(monkeypatch: pytest.MonkeyPatch) -> None:
    class Stuck(Trainer):
        def broadcast(self, tensor: torch.Tensor, src: int) -> None:
            while not self.is_destroyed:
                torch.zeros(1)

    monkeypatch.setattr(nccl, "make_id", lambda: bytes(128))
    monkeypatch.setattr(nccl, "join", lambda unique_id, size: Stuck())
    sender = nccl.NcclTransfer(1, torch.float32, 0.2)
    sender.take({"a": torch.ones(1)}, "1")
    connection: Any = Recorder("a")
    assert asyncio.run(sender.send([connection])) == [
        "new weights did not reach the servers by NCCL: no response in 0 s"
    ]


def test_nccl_without_enough_gpus_is_refused() -> None:
    settings = dataclasses.replace(SETTINGS, weight_transfer="nccl")
    with pytest.raises(ParamsError, match="engine.weight_transfer is nccl, which needs a GPU"):
        check_transfer(settings, 1)
    check_transfer(SETTINGS, 1)
