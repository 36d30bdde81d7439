"""A policy's weights as engines take them, whatever form the trainer holds them in."""

from collections.abc import Iterator, Mapping

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from tasks.models.adapters import adapted_layers, adapter_of, add_delta, dense


def is_sharded(model: torch.nn.Module) -> bool:
    """Return whether this process holds some rows of the model's parameters only."""
    return isinstance(model, FSDPModule)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor with all its rows. Where it is sharded, every rank must ask for it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class NamedWeights(Mapping[str, torch.Tensor]):
    """Every weight under the name an engine loads it by, the tied output head included, adapters
    added to the weights of their layers. What is sharded or adapted is put together when it is
    asked for, so that never all of it exists at once. Of a sharded policy all ranks must ask for
    the same weights in the same order.

    An engine that gets tied weights without `lm_head.weight` may silently keep its stale packed
    copy."""

    def __init__(self, model: PreTrainedModel) -> None:
        layers = adapted_layers(model)
        self.parts: dict[str, torch.Tensor] = {}
        self.adapters: dict[str, tuple[torch.Tensor, torch.Tensor, float]] = {}
        for name, tensor in model.state_dict().items():
            if ".lora_" not in name:
                self.parts[name.replace(".base_layer.", ".")] = tensor.detach()
        for name, layer in layers.items():
            self.adapters[f"{name}.weight"] = adapter_of(layer)
        head = model.get_output_embeddings()
        if head is not None and "lm_head.weight" not in self.parts:
            self.parts["lm_head.weight"] = head.weight.detach()

    @torch.no_grad()
    def __getitem__(self, name: str) -> torch.Tensor:
        weight = dense(whole(self.parts[name]))
        if name not in self.adapters:
            return weight
        low, high, factor = self.adapters[name]
        return add_delta(weight, whole(low), whole(high), factor)

    def __iter__(self) -> Iterator[str]:
        return iter(self.parts)

    def __len__(self) -> int:
        return len(self.parts)
