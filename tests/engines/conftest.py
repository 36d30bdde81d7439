"""Servers that several tests share, policies, and processes that run side by side."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from transformers import PreTrainedModel

from tasks.common.artifacts import Layout
from tasks.common.processes.ports import free_port
from tasks.engines.engine import Request, Samples
from tasks.engines.hf.engine import HfEngine
from tasks.engines.loading import load_engine
from tasks.engines.server.engine import ServerEngine
from tasks.engines.server.replicas import Replicas
from tasks.engines.settings import Sampling
from tasks.models.policy import Policy, load_model, read_policy
from tests.engines.serving import Behaviour, Server, StandIn
from tests.policies import ENGINE, place_policy

SETTINGS = dataclasses.replace(ENGINE, name="server", max_rows=8, num_replicas=2)
FLEET = dataclasses.replace(ENGINE, name="server", max_rows=4, max_retries=1)
REQUEST = Request(
    [[20, 14, 20, 3, 32], [21, 14, 22]], [3, 3], range(6), Sampling(0.8, 1.0, 0, 6, 0)
)
Fleet = Callable[..., Replicas]


class Servers:
    """Two vLLM servers of each policy that a test requests. They take long to start."""

    def __init__(self, logs: Path) -> None:
        self.logs = logs
        self.engines: dict[str, ServerEngine] = {}

    def of(self, policy: Policy) -> ServerEngine:
        """Return the policy's servers. A test must leave them unchanged."""
        if policy.digest not in self.engines:
            engine = load_engine(SETTINGS, policy, logs=self.logs)
            assert isinstance(engine, ServerEngine)
            self.engines[policy.digest] = engine
        return self.engines[policy.digest]

    def take(self, policy: Policy) -> ServerEngine:
        """Return the policy's servers, for a test that damages and closes them."""
        engine = self.of(policy)
        del self.engines[policy.digest]
        return engine


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    servers = Servers(tmp_path_factory.mktemp("logs"))
    yield servers
    for engine in servers.engines.values():
        engine.close()


@pytest.fixture(scope="module")
def policy(qwen: Path, tmp_path_factory: pytest.TempPathFactory) -> Policy:
    return placed(qwen, tmp_path_factory.mktemp("data"))


@pytest.fixture
def fleet(policy: Policy, tmp_path: Path) -> Iterator[Fleet]:
    """Start substitutes for vLLM's servers. Each argument determines whether a server loads new
    weights. Restarted servers do."""
    with ExitStack() as stack:

        def make(*loads: bool) -> Replicas:
            def start(place: int, attempt: int) -> StandIn:
                engine = HfEngine(scaled(policy, 1.0), [1], 8, 512)
                server = Server(engine, [policy.digest], loads=attempt > 0 or loads[place])
                return StandIn(stack.enter_context(server), f"{place}-{attempt}")

            return Replicas(start, len(loads), tmp_path, ExitStack())

        yield make


def does(replicas: Replicas, place: int) -> Behaviour:
    stand_in: Any = replicas.replicas[place]
    found: Behaviour = stand_in.server.does
    return found


def names(engine: ServerEngine) -> list[str]:
    return [endpoint.name for endpoint in engine.endpoints]


def expected(policy: Policy, factor: float) -> list[list[int]]:
    """Return the completions of REQUEST by `scaled(policy, factor)`."""
    return HfEngine(scaled(policy, factor), [1], 8, 512).generate(REQUEST).token_ids


def placed(folder: Path, root: Path) -> Policy:
    """Return the policy in `folder`, after recording it under a data root."""
    layout = Layout(root)
    place_policy(folder, layout, load(folder))
    return read_policy(layout)


def load(folder: Path) -> PreTrainedModel:
    return load_model(folder, dtype=torch.float32, device=torch.device("cpu"))


def scaled(policy: Policy, factor: float) -> PreTrainedModel:
    return scale(load(policy.folder), factor)


@torch.no_grad()
def scale(model: PreTrainedModel, factor: float) -> PreTrainedModel:
    """Multiply all weights of a model in place, and return it."""
    for parameter in model.parameters():
        parameter.mul_(factor)
    return model


@torch.no_grad()
def logits_of(
    model: PreTrainedModel, prompt: Sequence[int], completion: Sequence[int]
) -> torch.Tensor:
    """Return the logits [T, V] of a completion, computed without a cache."""
    found: torch.Tensor = model(torch.tensor([[*prompt, *completion]])).logits
    return found[0, len(prompt) - 1 : -1]


def logprob_gaps(
    model: PreTrainedModel, request: Request, samples: Samples
) -> list[npt.NDArray[np.float32]]:
    """Return [B] the |difference| of each token's log-probability to the model's."""
    gaps = []
    for row, owner in enumerate(request.owner_B()):
        completion = samples.token_ids[row]
        logits_TV = logits_of(model, request.prompts[owner], completion)
        every_TV = (logits_TV / request.sampling.temperature).log_softmax(-1)
        chosen_T = torch.tensor(completion, dtype=torch.int64)
        expected_T = every_TV[torch.arange(len(completion)), chosen_T]
        gaps.append(np.abs(expected_T.numpy() - np.array(samples.logprobs[row])))
    return gaps


def meetings(size: int) -> list[dict[str, str]]:
    """Return the variables that torchrun sets for each of `size` processes of one machine."""
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(size)}
    return [{**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)]
