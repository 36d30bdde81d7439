"""Low-rank adapters (LoRA, arXiv 2106.09685) in a policy's modules, and their effect on its
weights. Training adds them (`models/lora.py`). Every forward of the policy applies them;
without them the policy is the initial policy."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tasks.common.accounting.ledger import Architecture

NAME = "default"  # peft's name of the first adapter


def has_adapters(model: torch.nn.Module) -> bool:
    """Return whether the model has adapters (see `add_adapters`)."""
    return hasattr(model, "peft_config")


def adapted_layers(model: torch.nn.Module) -> dict[str, Any]:
    """Return the layers with an adapter, by name."""
    return {name: module for name, module in model.named_modules() if is_adapted(module)}


def is_adapted(module: torch.nn.Module) -> bool:
    """Return whether a linear layer has an adapter."""
    return hasattr(module, "base_layer") and hasattr(module, "lora_A")


def merged_weight(module: Any) -> torch.Tensor:
    """Return the weight of a linear layer, including its adapter."""
    if not is_adapted(module):
        weight: torch.Tensor = module.weight
        return weight
    return add_delta(dense(module.base_layer.weight), *adapter_of(module))


def is_quantized(weight: torch.Tensor) -> bool:
    """Return whether a frozen weight is stored in 4 bits, as torchao's NF4Tensor."""
    return hasattr(weight, "get_original_weight")


def dense(weight: Any) -> torch.Tensor:
    """Return the dequantized values of a 4-bit weight; any other weight unchanged."""
    found: torch.Tensor = weight.get_original_weight() if is_quantized(weight) else weight
    return found


def adapter_of(layer: Any) -> tuple[torch.Tensor, torch.Tensor, float]:
    """Return an adapter's two matrices, [rank, in] and [out, rank], and its factor."""
    return layer.lora_A[NAME].weight, layer.lora_B[NAME].weight, float(layer.scaling[NAME])


def add_delta(
    weight: torch.Tensor, low: torch.Tensor, high: torch.Tensor, factor: float
) -> torch.Tensor:
    """Return a layer's weight with its adapter, `weight + factor * high @ low` [out, in]."""
    return torch.addmm(weight, high.to(weight), low.to(weight), alpha=factor)


@contextmanager
def adapters_off(model: torch.nn.Module) -> Iterator[None]:
    """Compute as the initial policy, without adapters. Use this only without gradients. peft's
    own switch would change requires_grad, which FSDP has already recorded."""
    layers = [*adapted_layers(model).values()]
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def num_adapter_parameters(model: torch.nn.Module) -> int:
    """Return the total number of parameters of all adapters."""
    return sum(
        part.numel() for layer in adapted_layers(model).values() for part in adapter_of(layer)[:2]
    )


def update_factor(model: torch.nn.Module, architecture: Architecture) -> float:
    """Return the cost of an update per token, in forward passes: one forward pass, one more for the
    gradients of the inputs of the layers, and one for the gradients of their weights. With
    adapters, only the adapters' weights have gradients."""
    num_adapted = num_adapter_parameters(model)
    return 2.0 + 3.0 * num_adapted / architecture.num_matmul_parameters if num_adapted else 3.0
