"""Low-rank adapters (LoRA, arXiv 2106.09685): add them to a policy, and write them in peft's
format. Only this file imports peft. It also quantizes the frozen weights to 4 bits (QLoRA, arXiv
2305.14314) with torchao, an optional package.

Only the adapters' weights are trained. Their effect on the policy's weights is defined in
`models/adapters.py`."""

import json
import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.utils import logging as transformers_logging

from tasks.common.files import ArtifactError
from tasks.models.adapters import NAME, adapted_layers, adapter_of
from tasks.models.folder import names_in
from tasks.models.policy import Policy, load_model
from tasks.models.settings import Lora
from tasks.models.sharding import local, local_rows

ALL = "all-linear"
PREFIX = "base_model.model."  # of every name in an adapter's files
BLOCK, SCALES = 64, 256  # weights per scale, and scales per second-level scale


def add_adapters(model: PreTrainedModel, settings: Lora, seed: int) -> None:
    """Add adapters with zero output to `model`, and freeze everything else. Raise ArtifactError if
    a name in `settings.modules` matches no module, or one that is no linear layer with own weights:
    an embedding, an output head tied to it, experts and their router, or the Conv1D of GPT-2."""
    from peft import LoraConfig, get_peft_model

    modules, embedding = settings.modules, model.get_input_embeddings()
    linear = {
        name.rsplit(".")[-1]
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear) and module.weight is not embedding.weight
    }
    config = LoraConfig(
        r=settings.rank,
        lora_alpha=settings.alpha,  # type: ignore[arg-type]  # any number
        target_modules=ALL if modules == [ALL] else modules,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        try:
            on_meta = model.device.type == "meta"
            get_peft_model(model, config, low_cpu_mem_usage=on_meta)  # type: ignore[arg-type]
            names = [f".{name}" for name in adapted_layers(model)]
            if others := {name.rsplit(".")[-1] for name in names} - linear - {"base_layer"}:
                raise ValueError(f"{', '.join(sorted(others))} cannot have adapters")
            for module in modules if modules != [ALL] else []:
                if not any(name.endswith(f".{module}") for name in names):
                    raise ValueError(f"{module} not found")
        except ValueError as error:
            raise ArtifactError(
                f"lora.modules is {modules}, and the policy's linear layers are "
                f"{', '.join(sorted(linear)) or 'none'}: name some of these, or set lora to null "
                f"({error})"
            ) from error


def load_adapted(
    policy: Policy,
    settings: Lora,
    seed: int,
    shard: Callable[[PreTrainedModel], object],
    device: torch.device,
) -> PreTrainedModel | None:
    """Return a policy with the adapters that `add_adapters` would add, sharded by `shard` before it
    has weights (see `load_model`); None if its files name the layers differently."""
    trusted = policy.trust_remote_code
    with torch.device("meta"):
        config = AutoConfig.from_pretrained(policy.folder, trust_remote_code=trusted)
        empty = AutoModelForCausalLM.from_config(config, trust_remote_code=trusted)
    add_adapters(empty, settings, seed)
    names = [*adapted_layers(empty)]
    if not {f"{name}.weight" for name in names} <= names_in(policy.folder):
        return None

    def distribute(model: PreTrainedModel) -> None:
        add_adapters(model, settings, seed)
        shard(model)

    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()  # it would warn that the adapters are not in files
    model = load_model(
        policy.folder,
        dtype=torch.float32,
        device=device,
        trust_remote_code=trusted,
        shard=distribute,
        renamed={rf"^({'|'.join(map(re.escape, names))})(?=\.(?:weight|bias)$)": r"\1.base_layer"},
    )
    transformers_logging.set_verbosity(verbosity)
    initialize(model, seed)
    return model


@torch.no_grad()
def initialize(model: PreTrainedModel, seed: int) -> None:
    """Set uninitialized adapters to the values that peft draws with `seed`: it draws both matrices
    of a layer, then the first again. Each rank keeps its own rows."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        for layer in adapted_layers(model).values():
            low, high, _ = adapter_of(layer)
            drawn = torch.nn.Linear(low.shape[1], low.shape[0], bias=False)
            torch.nn.Linear(high.shape[1], high.shape[0], bias=False)
            torch.nn.init.kaiming_uniform_(drawn.weight, a=math.sqrt(5))
            local(low).copy_(drawn.weight[local_rows(low)])
            local(high).zero_()


def quantize_base(model: PreTrainedModel, device: torch.device) -> None:
    """Quantize the frozen weights of each adapted linear layer to 4 bits on `device`, one layer at
    a time, if their number is a multiple of BLOCK. Then move the whole model there."""
    from torchao.quantization import to_nf4

    for layer in adapted_layers(model).values():
        base = layer.base_layer
        if isinstance(base, torch.nn.Linear) and base.weight.numel() % BLOCK == 0:
            scales = math.gcd(base.weight.numel() // BLOCK, SCALES)
            held = to_nf4(base.weight.detach().to(device), BLOCK, scales)
            base.weight = torch.nn.Parameter(held, requires_grad=False)
    model.to(device)  # type: ignore[arg-type]
    torch.cuda.empty_cache()  # the memory of the quantization; an engine on this device may need it


def save_adapter(model: PreTrainedModel, tensors: dict[str, torch.Tensor], folder: Path) -> None:
    """Write the adapters in peft's format. `tensors` are keyed by the model's parameter names."""
    folder.mkdir(parents=True)
    config: Any = model.peft_config
    config[NAME].save_pretrained(folder)
    path = folder / "adapter_config.json"
    # the folder of the policy is specific to this machine
    card = {**json.loads(path.read_text()), "base_model_name_or_path": None}
    path.write_text(json.dumps(card, indent=2, sort_keys=True) + "\n")
    named = {PREFIX + name.replace(f".{NAME}.", "."): part for name, part in tensors.items()}
    save_file(named, folder / "adapter_model.safetensors", metadata={"format": "pt"})
