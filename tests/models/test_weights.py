"""Weights on their way to an engine: the names and shapes of a policy's files, whatever they are in
memory."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as distributed
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    GptOssConfig,
    LlamaConfig,
    MixtralConfig,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

from tasks.models.policy import load_model
from tasks.models.sharding import shard
from tasks.models.weights import NamedWeights, as_saved, is_sharded
from tests.models.test_packing import EXPERTS, GROUPED
from tests.policies import adapted
from tests.stages import FORKS

CPU = torch.device("cpu")
CONFIGS = {
    "llama": LlamaConfig(**GROUPED),
    "mixtral": MixtralConfig(**GROUPED, num_local_experts=4),
    "qwen2_moe": Qwen2MoeConfig(**GROUPED, **EXPERTS, shared_expert_intermediate_size=24),
    "qwen3_moe": Qwen3MoeConfig(**GROUPED, **EXPERTS),
    "gpt_oss": GptOssConfig(**GROUPED, num_local_experts=4, num_experts_per_tok=2),
}


def saved(name: str, folder: Path) -> dict[str, torch.Tensor]:
    """The tensors in the files of a new policy in `folder`."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(CONFIGS[name], dtype=torch.float32).save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def check_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert set(found) == set(expected)
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


@pytest.mark.parametrize("name", CONFIGS)
def test_weights_are_sent_as_they_are_in_the_files(name: str, tmp_path: Path) -> None:
    files = saved(name, tmp_path)
    model = load_model(tmp_path, dtype=torch.float32, device=CPU)
    check_equal(dict(as_saved(NamedWeights(model))), files)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(2.0)
    doubled = {name: 2.0 * tensor for name, tensor in files.items()}
    check_equal(dict(as_saved(NamedWeights(model))), doubled)


class Counted(NamedWeights):
    """Weights that count how many were asked for."""

    num_asked = 0

    def __getitem__(self, name: str) -> torch.Tensor:
        self.num_asked += 1
        return super().__getitem__(name)


@pytest.mark.parametrize("name", CONFIGS)
def test_no_more_than_a_layer_is_asked_for_at_a_time(name: str, tmp_path: Path) -> None:
    saved(name, tmp_path)
    weights = Counted(load_model(tmp_path, dtype=torch.float32, device=CPU))
    for sent, _ in as_saved(weights):
        if sent.startswith("model.layers.0."):
            assert weights.num_asked <= sum(".layers.1." not in each for each in weights)
    assert weights.num_asked == len(weights)


def sharded(folder: Path, out: Path) -> None:
    """The only one of one process: the weights of a sharded policy with adapters, as sent."""
    method = f"file://{out.parent}/meeting"
    distributed.init_process_group("gloo", init_method=method, rank=0, world_size=1)
    model: Any = adapted(folder, ["q_proj", "v_proj"])
    shard(model, CPU, torch.float32, ())
    assert is_sharded(model)
    save_file({name: part.contiguous() for name, part in as_saved(NamedWeights(model))}, out)
    distributed.destroy_process_group()


def test_sharded_and_adapted_weights_are_sent_whole_and_merged(tmp_path: Path) -> None:
    folder, out = tmp_path / "policy", tmp_path / "sent"
    files = saved("mixtral", folder)
    process = FORKS.Process(target=sharded, args=(folder, out))
    process.start()
    process.join()
    assert process.exitcode == 0
    merged = dict(NamedWeights(adapted(folder, ["q_proj", "v_proj"])))
    changed = {name for name in files if "q_proj" in name or "v_proj" in name}
    assert all(not torch.equal(files[name], merged[name]) for name in changed)
    check_equal(load_file(out), files | {name: merged[name] for name in changed})
