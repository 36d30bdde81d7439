"""What low-rank adapters (LoRA, arXiv 2106.09685) in a policy's modules do to its weights. Training
puts them there (`train/learner/lora.py`): every forward of the policy computes them, and without
them it is the policy that it began as."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

NAME = "default"  # peft's, of the first adapter


def has_adapters(model: torch.nn.Module) -> bool:
    """Return whether `add_adapters` was called on the model."""
    return hasattr(model, "peft_config")


def adapted_layers(model: torch.nn.Module) -> dict[str, Any]:
    """Return the layers with an adapter by their names."""
    return {name: module for name, module in model.named_modules() if is_adapted(module)}


def is_adapted(module: torch.nn.Module) -> bool:
    """Return whether a linear layer has an adapter."""
    return hasattr(module, "base_layer") and hasattr(module, "lora_A")


def merged_weight(module: Any) -> torch.Tensor:
    """Return the weight of a linear layer, with what its adapter adds."""
    if not is_adapted(module):
        weight: torch.Tensor = module.weight
        return weight
    low, high, factor = adapter_of(module)
    return add_delta(dense(module.base_layer.weight), low, high, factor)


def is_quantized(weight: torch.Tensor) -> bool:
    """Return whether a frozen weight is held in 4 bits: in torchao's NF4Tensor."""
    return hasattr(weight, "get_original_weight")


def dense(weight: Any) -> torch.Tensor:
    """Return the values that a weight in 4 bits stands for; any other as it is."""
    found: torch.Tensor = weight.get_original_weight() if is_quantized(weight) else weight
    return found


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
