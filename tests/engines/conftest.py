"""vLLM's servers, which take long to start, once for all tests."""

import dataclasses
import socket
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers import PreTrainedModel

from tasks.common.artifacts import Layout
from tasks.engines.engine import Request, Samples
from tasks.engines.loading import load_engine
from tasks.engines.server.engine import ServerEngine
from tasks.models.policy import Policy, load_model, read_policy
from tests.policies import ENGINE, place_policy

SETTINGS = dataclasses.replace(ENGINE, name="server", max_rows=8, num_replicas=2)


class Servers:
    """Two servers of each policy that a test asks for."""

    def __init__(self) -> None:
        self.engines: dict[str, ServerEngine] = {}

    def of(self, policy: Policy) -> ServerEngine:
        """The policy's servers, started if need be; they must be left as they were."""
        if policy.digest not in self.engines:
            engine = load_engine(SETTINGS, policy)
            assert isinstance(engine, ServerEngine)
            self.engines[policy.digest] = engine
        return self.engines[policy.digest]

    def take(self, policy: Policy) -> ServerEngine:
        """The policy's servers, to be damaged and closed."""
        engine = self.of(policy)
        del self.engines[policy.digest]
        return engine


@pytest.fixture(scope="session")
def servers() -> Iterator[Servers]:
    servers = Servers()
    yield servers
    for engine in servers.engines.values():
        engine.close()


@pytest.fixture(scope="module")
def policy(qwen: Path, tmp_path_factory: pytest.TempPathFactory) -> Policy:
    """A policy that vLLM can serve."""
    layout = Layout(tmp_path_factory.mktemp("data"))
    place_policy(qwen, layout, load_model(qwen, dtype=torch.float32, device=torch.device("cpu")))
    return read_policy(layout)


def scaled(policy: Policy, factor: float) -> PreTrainedModel:
    """The policy with all its weights so many times as large."""
    model = load_model(policy.folder, dtype=torch.float32, device=torch.device("cpu"))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(factor)
    return model


@torch.no_grad()
def logprob_gaps(
    model: PreTrainedModel, request: Request, samples: Samples
) -> list[npt.NDArray[np.float32]]:
    """[B] of each completion's tokens, the |difference| of its log-probability to the model's."""
    gaps = []
    for row, owner in enumerate(request.owner_B()):
        prompt, completion = list(request.prompts[owner]), samples.token_ids[row]
        logits_TV = model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
        every_TV = (logits_TV / request.sampling.temperature).log_softmax(-1)
        expected_T = every_TV[torch.arange(len(completion)), torch.tensor(completion)]
        gaps.append(np.abs(expected_T.numpy() - np.array(samples.logprobs[row])))
    return gaps


def meetings(size: int) -> list[dict[str, str]]:
    """What torchrun tells each of `size` processes of one machine."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(size)}
    return [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)]
