"""Mixtures of experts in vLLM: it samples with new weights, in this process and in servers."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, MixtralConfig, PreTrainedModel, Qwen3MoeConfig

from tasks.common.artifacts import Layout
from tasks.common.files import ArtifactError
from tasks.engines.engine import Engine, Request, Sampling, load_engine
from tasks.models.policy import Policy, load_model, read_policy
from tasks.models.weights import NamedWeights
from tests.engines.conftest import logprob_gaps
from tests.policies import ENGINE, character_tokenizer, place_policy

SHAPE: dict[str, Any] = {
    "vocab_size": 98,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 96,
    "max_position_embeddings": 256,
    "eos_token_id": 1,
    "num_experts_per_tok": 2,
}
CONFIGS = {
    "mixtral": MixtralConfig(**SHAPE, num_local_experts=4),
    "qwen3_moe": Qwen3MoeConfig(**SHAPE, num_experts=4, moe_intermediate_size=32),
}
REQUEST = Request(
    [[20, 14, 20, 3], [21, 14, 22, 9]], [3, 3], range(6), Sampling(1.0, 1.0, 0, 12, 0)
)
TOLERANCE = 1e-4
Make = Callable[[str], tuple[Policy, PreTrainedModel]]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """A new policy of the named architecture, and its model."""

    def made(name: str) -> tuple[Policy, PreTrainedModel]:
        torch.manual_seed(0)
        folder, layout = tmp_path / name, Layout(tmp_path / "data")
        model = AutoModelForCausalLM.from_config(CONFIGS[name], dtype=torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.ndim > 1:
                    parameter.mul_(4.0)
        model.save_pretrained(folder)
        character_tokenizer().save_pretrained(folder)
        place_policy(folder, layout, model)
        loaded = load_model(folder, dtype=torch.float32, device=torch.device("cpu"))
        return read_policy(layout), loaded

    return made


def check_samples(engine: Engine, model: PreTrainedModel) -> list[list[int]]:
    """What the engine samples, whose log-probabilities must be the model's."""
    samples = engine.generate(REQUEST)
    assert max(gap.max() for gap in logprob_gaps(model, REQUEST, samples)) < TOLERANCE
    return samples.token_ids


def check_updates(engine: Engine, model: PreTrainedModel) -> None:
    """Weights that have not changed, and changed ones, more than once: each of them alone."""
    before = check_samples(engine, model)
    engine.set_weights(NamedWeights(model))
    assert check_samples(engine, model) == before
    for part in (".experts.", ".gate.", "_proj.weight"):
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if part in name:
                    parameter.mul_(1.3)
        engine.set_weights(NamedWeights(model))
        after = check_samples(engine, model)
        assert after != before
        before = after


@pytest.mark.vllm
@pytest.mark.parametrize("name", CONFIGS)
def test_vllm_samples_with_new_experts(name: str, make: Make) -> None:
    policy, model = make(name)
    check_updates(load_engine(replace(ENGINE, name="vllm"), policy, model), model)


@pytest.mark.vllm
def test_servers_sample_with_new_experts(make: Make) -> None:
    policy, model = make("mixtral")
    engine: Any = load_engine(replace(ENGINE, name="server", max_rows=8), policy, model)
    try:
        check_updates(engine, model)
    finally:
        engine.close()


@pytest.mark.vllm
def test_weights_that_vllm_does_not_take_are_refused_in_a_sentence(make: Make) -> None:
    policy, model = make("mixtral")
    engine = load_engine(replace(ENGINE, name="vllm"), policy, model)
    in_memory = dict(NamedWeights(model))
    with pytest.raises(
        ArtifactError,
        match=r"vLLM 0\.32\.0 does not take new weights of this policy, so it cannot sample in "
        r"training: set engine\.name to hf\. The reason: .*layers\.0\.mlp",
    ):
        engine.set_weights(in_memory)
