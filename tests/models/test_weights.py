"""Weights for an engine: they have the names and shapes of a policy's files."""

from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as distributed
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForCausalLM,
    GptOssConfig,
    LlamaConfig,
    MixtralConfig,
    PreTrainedModel,
    Qwen2MoeConfig,
    Qwen3MoeConfig,
)

from tasks.common.accounting.ledger import Architecture
from tasks.engines.weights import changes
from tasks.engines.weights.files import FileTransfer
from tasks.models.lora import add_adapters, load_adapted
from tasks.models.policy import Policy
from tasks.models.settings import Lora
from tasks.models.sharding import local, shard
from tasks.models.weights import (
    NamedWeights,
    as_saved,
    is_saved_as_it_is,
    whole,
)
from tests.engines.conftest import load, scale
from tests.models.test_packing import EXPERTS, GROUPED
from tests.stages import run_in_workers

CPU = torch.device("cpu")
CONFIGS = {
    "llama": LlamaConfig(**GROUPED),
    "mixtral": MixtralConfig(**GROUPED, num_local_experts=4),
    "qwen2_moe": Qwen2MoeConfig(**GROUPED, **EXPERTS, shared_expert_intermediate_size=24),
    "qwen3_moe": Qwen3MoeConfig(**GROUPED, **EXPERTS),
    "gpt_oss": GptOssConfig(**GROUPED, num_local_experts=4, num_experts_per_tok=2),
}


def saved(name: str, folder: Path) -> dict[str, torch.Tensor]:
    """Save a new policy in `folder`, and return the tensors in its files."""
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(CONFIGS[name], dtype=torch.float32).save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def check_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert set(found) == set(expected)
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


@pytest.mark.parametrize("name", CONFIGS)
def test_weights_are_sent_as_in_the_files_layer_by_layer(name: str, tmp_path: Path) -> None:
    files = saved(name, tmp_path)
    model = scale(load(tmp_path), 2.0)
    weights, sent = Counted(model), dict[str, torch.Tensor]()
    for each, tensor in as_saved(weights):
        sent[each] = tensor
        if each.startswith("model.layers.0."):
            assert weights.num_read <= sum(".layers.1." not in key for key in weights)
    assert weights.num_read == len(weights)
    check_equal(sent, {name: 2.0 * tensor for name, tensor in files.items()})


class Counted(NamedWeights):
    """Weights that count their reads."""

    num_read = 0

    def __getitem__(self, name: str) -> torch.Tensor:
        self.num_read += 1
        return super().__getitem__(name)


LORA = Lora(rank=3, alpha=4.0, modules=["q_proj", "v_proj"], base_bits=32)
SIZES = Architecture(1, 1, 1, 1)


@torch.no_grad()
def change_an_adapter(model: PreTrainedModel) -> None:
    next(part for name, part in model.named_parameters() if ".lora_B." in name).add_(1.0)


def load_by_rows(rank: int, folder: Path, root: Path) -> None:
    """Load the rows of one of two ranks of a policy, and of its adapters."""
    method = f"file://{root}/meeting"
    distributed.init_process_group("gloo", init_method=method, rank=rank, world_size=2)
    by_rows = partial(shard, device=CPU, dtype=torch.float32, forwards=())
    policy = Policy(folder, "", SIZES, 64, 61, trust_remote_code=False)
    model = load_adapted(policy, LORA, 5, by_rows, CPU)
    assert model is not None
    half = sum(local(parameter).numel() for parameter in model.parameters())
    assert half < 0.6 * sum(parameter.numel() for parameter in model.parameters())
    found = {name: whole(tensor) for name, tensor in model.state_dict().items()}
    change_an_adapter(model)
    sent = dict(as_saved(NamedWeights(model)))
    files = FileTransfer(root / "w", folder, torch.float32)
    files.take(NamedWeights(model), "1")
    received = {k: v for piece in files.pieces.values() for k, v in changes.read(*piece)}
    check_equal({name: sent[name] for name in received}, received)
    assert (root / "w" / "1.safetensors").exists() == is_saved_as_it_is(model)  # only the adapters
    if rank == 0:
        save_file({name: part.contiguous().clone() for name, part in found.items()}, root / "own")
        save_file({name: part.contiguous().clone() for name, part in sent.items()}, root / "sent")
    distributed.destroy_process_group()


@pytest.mark.parametrize("name", ["llama", "mixtral", "gpt_oss"])
def test_each_rank_loads_its_rows_of_a_policy_with_adapters(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "policy"
    files = saved(name, folder)
    alone = load(folder)
    add_adapters(alone, LORA, 5)
    run_in_workers(load_by_rows, [(rank, folder, tmp_path) for rank in range(2)])
    check_equal(load_file(tmp_path / "own"), dict(alone.state_dict()))
    change_an_adapter(alone)
    sent = load_file(tmp_path / "sent")
    check_equal(sent, dict(as_saved(NamedWeights(alone))))
    assert sum(not torch.equal(files[each], sent[each]) for each in files) == 1


def test_policy_with_other_names_is_not_loaded_by_rows(tmp_path: Path) -> None:
    files = saved("llama", tmp_path)
    renamed = {name.replace("model.", "other."): part for name, part in files.items()}
    save_file(renamed, tmp_path / "model.safetensors")
    policy = Policy(tmp_path, "", SIZES, 64, 61, trust_remote_code=False)
    assert load_adapted(policy, LORA, 5, lambda model: None, CPU) is None
