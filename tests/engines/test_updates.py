"""New weights in vLLM, of mixtures of experts, and of a model without an output head, too."""

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    GptOssConfig,
    MixtralConfig,
    PreTrainedModel,
    Qwen3MoeConfig,
)

from tasks.common.files import ArtifactError
from tasks.engines.engine import Engine, Request, Samples, Unavailable
from tasks.engines.loading import load_engine
from tasks.engines.server import transfer
from tasks.engines.server.endpoints import Connection
from tasks.engines.server.engine import ServerEngine
from tasks.engines.settings import Sampling
from tasks.engines.weights.files import FileTransfer
from tasks.models.policy import Policy
from tasks.models.weights import NamedWeights
from tests.engines.conftest import Servers, load, logprob_gaps, placed, scaled
from tests.policies import ENGINE, adapted, character_tokenizer
from tests.stages import run_together

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
}
EXPERTS: dict[str, Any] = {"num_experts_per_tok": 2}
CONFIGS = {
    "gemma2": Gemma2Config(**{**SHAPE, "tie_word_embeddings": True}, query_pre_attn_scalar=32),
    "gpt_oss": GptOssConfig(**SHAPE, **EXPERTS, num_local_experts=4),
    "mixtral": MixtralConfig(**SHAPE, **EXPERTS, num_local_experts=4),
    "qwen3_moe": Qwen3MoeConfig(**SHAPE, **EXPERTS, num_experts=4, moe_intermediate_size=32),
}
REQUEST = Request(
    [[20, 14, 20, 3], [21, 14, 22, 9]], [3, 3], range(6), Sampling(1.0, 1.0, 0, 12, 0)
)
TOLERANCE = 1e-4
ARCHITECTURES = ("mixtral", "qwen3_moe", "gemma2")  # the first has experts


def make(name: str, root: Path) -> tuple[Policy, PreTrainedModel]:
    torch.manual_seed(0)
    folder = root / "policy"
    model = AutoModelForCausalLM.from_config(CONFIGS[name], dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4.0)
    model.save_pretrained(folder)
    character_tokenizer().save_pretrained(folder)
    return placed(folder, root / "data"), load(folder)


def check_samples(engine: Engine, model: PreTrainedModel) -> Samples:
    """Return samples of the engine. Their log-probabilities must be the model's."""
    samples = engine.generate(REQUEST)
    assert max(gap.max() for gap in logprob_gaps(model, REQUEST, samples)) < TOLERANCE
    return samples


def check_updates(engine: Engine, model: PreTrainedModel) -> None:
    """Load unchanged weights, then changed ones several times."""
    before = check_samples(engine, model)
    engine.set_weights(NamedWeights(model))
    assert check_samples(engine, model).token_ids == before.token_ids
    for part in ("embed", "layers.0", "layers.1"):
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if part in name:
                    parameter.mul_(1.3)
        engine.set_weights(NamedWeights(model))
        after = check_samples(engine, model)
        assert after.logprobs != before.logprobs
        before = after


REFUSAL = (
    r"vLLM 0\.32\.0 does not accept new weights of this policy, so it cannot sample in training: "
    r"set engine\.name to hf\. The reason: .*layers\.0\.mlp"
)


def update_in_process(root: Path) -> None:
    """Check updates of each architecture in a process of their own: vLLM creates the groups that
    experts need only if its first model has experts."""
    for name in ARCHITECTURES:
        check_architecture(name, root / name)


def check_architecture(name: str, root: Path) -> None:
    """Check updates of one architecture. Its engine ends before the next one begins."""
    policy, model = make(name, root)
    engine = load_engine(replace(ENGINE, name="vllm"), policy, model)
    check_updates(engine, model)
    if name == "mixtral":
        # names in memory differ from the names in files
        with pytest.raises(ArtifactError, match=REFUSAL):
            engine.set_weights(dict(NamedWeights(model)))


@pytest.mark.vllm
def test_vllm_samples_with_new_weights(tmp_path: Path) -> None:
    run_together(update_in_process, [(tmp_path,)])


@pytest.mark.vllm
def test_servers_sample_with_new_weights(policy: Policy, servers: Servers, tmp_path: Path) -> None:
    engine, model = servers.of(policy), scaled(policy, 1.0)
    check_updates(engine, model)
    asyncio.run(leave_in_the_middle(engine, model, tmp_path))
    check_updates(engine, model)
    check_changes(engine, model)
    check_adapters(engine, policy)
    engine.set_weights(NamedWeights(scaled(policy, 1.0)))


def check_changes(engine: ServerEngine, model: PreTrainedModel) -> None:
    """Update few elements twice. The second update is read on top of the first."""
    assert isinstance(engine.transfer, FileTransfer)
    engine.transfer.only_changes = True
    names = ("model.norm.weight", "model.layers.0.input_layernorm.weight")
    for num_changes, name in enumerate(names, 1):
        before = check_samples(engine, model)
        with torch.no_grad():
            model.get_parameter(name).mul_(1.2)
        engine.set_weights(NamedWeights(model))
        (piece,) = engine.transfer.pieces.values()
        assert len(piece.changes) == num_changes
        assert check_samples(engine, model).logprobs != before.logprobs
    engine.transfer.only_changes = False


def check_adapters(engine: ServerEngine, policy: Policy) -> None:
    """Update adapters, which the servers add to their initial weights."""
    assert isinstance(engine.transfer, FileTransfer)
    engine.transfer.pieces = {}  # as in a new process
    for module in ("q_proj", "down_proj"):
        model = adapted(policy.folder, [module])
        engine.set_weights(NamedWeights(model))
        files = [Path(piece.path).name for piece in engine.transfer.pieces.values()]
        assert files == ["model.safetensors", "head.safetensors"]
        check_samples(engine, model)


async def leave_in_the_middle(engine: Any, model: PreTrainedModel, root: Path) -> None:
    """Interrupt an update after the first of many pieces, and leave it."""
    transferred = FileTransfer(root, root, torch.float32)
    transferred.piece_bytes = 20_000
    transferred.take(NamedWeights(model), "half")
    first, *others = transferred.pieces.values()
    assert len(others) > 1
    async with Connection(engine.endpoints[0], 60.0) as connection:
        await connection.request("POST", f"{connection.endpoint.root}/pause?mode=wait")
        await transfer.leave_update(connection)  # only paused
        await transfer.begin(connection, in_flight=False)
        url = f"{connection.endpoint.root}/update_weights"
        await connection.request("POST", url, {"update_info": {"path": first.path}})
        with pytest.raises(Unavailable, match="already active"):
            await transfer.begin(connection, in_flight=False)
        await transfer.leave_update(connection)
        await transfer.check_version(connection, transfer.UNFINISHED)


@pytest.mark.parametrize("engine", ["vllm", "server"])
def test_policy_whose_experts_vllm_keeps_is_refused(engine: str, tmp_path: Path) -> None:
    policy, model = make("gpt_oss", tmp_path)
    with pytest.raises(ArtifactError, match=r"vLLM 0\.32 keeps the old experts of a gpt_oss model"):
        load_engine(replace(ENGINE, name=engine), policy, model)
