"""A policy's weights in the form that engines load, from any form that the trainer uses."""

import re
from collections.abc import Iterator, Mapping
from itertools import groupby

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from tasks.models.adapters import adapted_layers, adapter_of, add_delta, dense

LAYER = re.compile(r".*?\.\d+\.")  # a name up to the number of its layer; other names match nothing


def is_sharded(model: torch.nn.Module) -> bool:
    """Return whether this process stores only some rows of the model's parameters."""
    return isinstance(model, FSDPModule)


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor with all its rows. If it is sharded, every rank must call this."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


class NamedWeights(Mapping[str, torch.Tensor]):
    """Every weight under its name in the model, including the tied output head, with adapters added
    to the weights of their layers. Sharded or adapted weights are computed at access, so that they
    never all exist at once. With a sharded policy, all ranks must access the same weights in the
    same order.

    An engine that loads tied weights without `lm_head.weight` may silently keep its stale packed
    copy."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.parts: dict[str, torch.Tensor] = {}
        for name, tensor in model.state_dict().items():
            if ".lora_" not in name:
                self.parts[name.replace(".base_layer.", ".")] = tensor.detach()
        layers = adapted_layers(model).items()
        self.adapters = {f"{name}.weight": adapter_of(layer) for name, layer in layers}
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


@torch.no_grad()
def load_weights(model: PreTrainedModel | None, weights: Mapping[str, torch.Tensor]) -> None:
    """Copy weights to a model by name, except those that it does not have. Without a model they are
    only read, for the other ranks."""
    copies = model.state_dict() if model is not None else {}
    for name, tensor in weights.items():
        if name in copies:
            copies[name].copy_(tensor)


def as_saved(weights: Mapping[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the weights with the names and shapes of a policy's files, which vLLM loads. In memory,
    for example, the experts of a layer are a single tensor under another name.

    transformers' own reverse conversion expects all weights at once. It gets one layer at a time,
    so that a whole sharded or adapted policy never exists at once. Every weight is read once, in
    order. A mapping that is not `NamedWeights` is yielded unchanged."""
    if not isinstance(weights, NamedWeights) or is_saved_as_it_is(weights.model):
        yield from weights.items()
        return
    for _, names in groupby(weights, key=lambda name: (LAYER.match(name) or [name])[0]):
        layer = ((name, weights[name]) for name in names)
        yield from revert_weight_conversion(weights.model, dict(layer)).items()


def is_saved_as_it_is(model: PreTrainedModel) -> bool:
    """Return whether transformers converted no weight when it loaded the model."""
    return getattr(model, "_weight_conversions", None) == []
