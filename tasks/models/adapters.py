"""Low-rank adapters (LoRA, arXiv 2106.09685) in a policy, by peft. The only file that imports it.

The adapters stand in the policy's own modules, so that every forward of it computes them. The
weights that are trained are theirs alone; without them the policy is the one that it began as."""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from tasks.common.files import ArtifactError
from tasks.common.params import at_least

ALL = "all-linear"
NAME = "default"  # peft's, of the first adapter
PREFIX = "base_model.model."  # before every name in an adapter's files


@dataclass(frozen=True)
class Lora:
    """The section `train.lora`: the rank of the adapters, the factor `alpha` / rank on what they
    add, and the linear layers that get one by the last part of their names; `[all-linear]` are all
    but the output head."""

    rank: int
    alpha: float
    modules: list[str]

    def __post_init__(self) -> None:
        at_least(1, train__lora__rank=self.rank)


def add_adapters(model: PreTrainedModel, settings: Lora, seed: int) -> None:
    """Put adapters that add nothing yet into `model`, and freeze everything else. Raises
    ArtifactError where no module has one of the names."""
    from peft import LoraConfig, get_peft_model

    modules = settings.modules
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,  # type: ignore[arg-type]  # any number
        target_modules=ALL if modules == [ALL] else modules,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        try:
            get_peft_model(model, config)  # type: ignore[arg-type]
        except ValueError as error:
            linear = {
                name.rsplit(".")[-1]
                for name, module in model.named_modules()
                if isinstance(module, torch.nn.Linear)
            }
            raise ArtifactError(
                f"train.lora.modules is {settings.modules}, and the policy's linear layers are "
                f"{', '.join(sorted(linear))} ({error})"
            ) from error


def has_adapters(model: torch.nn.Module) -> bool:
    """Return whether `add_adapters` was called on the model."""
    return hasattr(model, "peft_config")


def adapted_layers(model: torch.nn.Module) -> dict[str, Any]:
    """Return the layers with an adapter by their names."""
    if not has_adapters(model):
        return {}
    from peft.tuners.lora import LoraLayer

    return {name: m for name, m in model.named_modules() if isinstance(m, LoraLayer)}


def merged_weight(module: Any) -> torch.Tensor:
    """Return the weight of a linear layer, with what its adapter adds."""
    if not hasattr(module, "lora_A"):
        weight: torch.Tensor = module.weight
        return weight
    low, high, factor = adapter_of(module)
    return add_delta(module.base_layer.weight, low, high, factor)


def adapter_of(layer: Any) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Return an adapter's two matrices, [rank, in] and [out, rank], and its factor."""
    return layer.lora_A[NAME].weight, layer.lora_B[NAME].weight, float(layer.scaling[NAME])


def add_delta(
    weight: torch.Tensor, low: torch.Tensor, high: torch.Tensor, factor: float
) -> torch.Tensor:
    """Return the weight [out, in] of a layer and its adapter together."""
    return torch.addmm(weight, high.to(weight), low.to(weight), alpha=factor)


@contextmanager
def adapters_off(model: torch.nn.Module) -> Iterator[None]:
    """Compute without the adapters: the policy as it began. Without gradient only: peft's own
    switch changes what requires one, which FSDP has taken note of."""
    layers = [*adapted_layers(model).values()]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def num_adapter_parameters(model: torch.nn.Module) -> int:
    """Return the number of weights of all adapters."""
    return sum(
        part.numel() for layer in adapted_layers(model).values() for part in adapter_of(layer)[:2]
    )


def save_adapter(model: PreTrainedModel, tensors: dict[str, torch.Tensor], folder: Path) -> None:
    """Write the adapters, whose `tensors` have the model's own names, as peft loads them."""
    folder.mkdir(parents=True)
    config: Any = model.peft_config
    config[NAME].save_pretrained(folder)
    path = folder / "adapter_config.json"
    # which folder the policy was loaded from is this machine's affair
    card = {**json.loads(path.read_text()), "base_model_name_or_path": None}
    path.write_text(json.dumps(card, indent=2, sort_keys=True) + "\n")
    named = {PREFIX + name.replace(f".{NAME}.", "."): part for name, part in tensors.items()}
    save_file(named, folder / "adapter_model.safetensors", metadata={"format": "pt"})
