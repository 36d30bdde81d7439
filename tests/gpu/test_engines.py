"""vLLM on a GPU with a trainer: samples, memory during sleep, and the check of memory."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from tasks.common.files import ArtifactError
from tasks.engines.engine import Engine, Request
from tasks.engines.loading import check_shared_gpu, load_engine
from tasks.engines.memory import TrainingMemory
from tasks.engines.settings import Sampling
from tasks.models.policy import Policy, load_model
from tasks.models.weights import NamedWeights
from tests.engines.conftest import placed
from tests.policies import ENGINE

pytestmark = [pytest.mark.gpu, pytest.mark.vllm]

SETTINGS = dataclasses.replace(ENGINE, name="vllm", device="cuda", memory_fraction=0.2, sleep=True)
SAMPLING = Sampling(temperature=0.8, top_p=1.0, top_k=0, max_tokens=12, seed=0)
MEMORY = TrainingMemory(0.0, 0.0, 0.0, 0.0, 0.0)
PROMPTS = [[20, 14, 20, 3, 32], [21, 14, 22, 9]]


@pytest.fixture(scope="module")
def policy(qwen: Path, tmp_path_factory: pytest.TempPathFactory) -> Policy:
    return placed(qwen, tmp_path_factory.mktemp("data"))


@pytest.fixture(scope="module")
def model(policy: Policy) -> Any:
    return load_model(policy.folder, dtype=torch.float32, device=torch.device("cuda"))


@pytest.fixture(scope="module")
def trained(policy: Policy, model: Any) -> Engine:
    """vLLM with a trainer."""
    return load_engine(SETTINGS, policy, model)


def draw(engine: Engine) -> list[list[int]]:
    return engine.generate(Request(PROMPTS, [16, 16], list(range(32)), SAMPLING)).token_ids


def test_greedy_samples_agree_with_hf(trained: Engine, policy: Policy) -> None:
    greedy = dataclasses.replace(SAMPLING, temperature=0.0)
    request = Request(PROMPTS, [1, 1], [0, 0], greedy)
    hf = load_engine(dataclasses.replace(SETTINGS, name="hf"), policy)
    assert trained.generate(request).token_ids == hf.generate(request).token_ids


def test_sleep_frees_memory_and_changes_no_sample(trained: Engine) -> None:
    before = draw(trained)
    free, total = torch.cuda.mem_get_info()
    trained.sleep()
    lent = torch.cuda.mem_get_info()[0] - free
    assert lent > 0.5 * SETTINGS.memory_fraction * total
    assert draw(trained) == before
    assert torch.cuda.mem_get_info()[0] < free + lent / 2


def test_weights_replaced_during_sleep_are_in_effect(trained: Engine, model: Any) -> None:
    before = draw(trained)
    original = {name: tensor.clone() for name, tensor in NamedWeights(model).items()}
    trained.sleep()
    trained.set_weights({name: 1.02 * tensor for name, tensor in original.items()})
    assert draw(trained) != before
    trained.sleep()
    trained.set_weights(original)
    assert draw(trained) == before


def test_engine_that_does_not_fit_is_refused(model: Any) -> None:
    settings = dataclasses.replace(SETTINGS, memory_fraction=1.1)
    with pytest.raises(ArtifactError, match=r"does not fit this GPU.*lower engine.memory_fraction"):
        check_shared_gpu(settings, 1, model.device, MEMORY)


def test_replica_samples_on_a_gpu(policy: Policy, trained: Engine) -> None:
    engine = load_engine(dataclasses.replace(SETTINGS, name="server"), policy)
    try:
        assert [len(ids) <= SAMPLING.max_tokens for ids in draw(engine)] == [True] * 32
        assert draw(engine) == draw(engine)
    finally:
        engine.close()  # type: ignore[attr-defined]
