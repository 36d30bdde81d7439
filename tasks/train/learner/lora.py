"""Low-rank adapters (LoRA, arXiv 2106.09685): add them to a policy, and write them in peft's
format. Only this file imports peft. Also the frozen weights in 4 bits (QLoRA, arXiv 2305.14314),
by torchao, an extra.

Only the adapters' weights are trained. Their effect on the policy's weights is defined in
`models/adapters.py`."""

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import PreTrainedModel

from tasks.common.files import ArtifactError
from tasks.models.adapters import NAME, adapted_layers
from tasks.train.settings import Lora

ALL = "all-linear"
PREFIX = "base_model.model."  # of every name in an adapter's files
BLOCK, SCALES = 64, 256  # weights per scale, and scales per second-level scale


def add_adapters(model: PreTrainedModel, settings: Lora, seed: int) -> None:
    """Add adapters with zero output to `model`, and freeze everything else. Raises ArtifactError if
    no module has one of the names."""
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


def quantize_base(model: PreTrainedModel, device: torch.device) -> None:
    """Quantize the frozen weights of the adapted linear layers to 4 bits, and move the model to
    `device`, which never stores them unquantized."""
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
    """Write the adapters in peft's format. `tensors` have the model's own names."""
    folder.mkdir(parents=True)
    config: Any = model.peft_config
    config[NAME].save_pretrained(folder)
    path = folder / "adapter_config.json"
    # the folder of the policy is specific to this machine
    card = {**json.loads(path.read_text()), "base_model_name_or_path": None}
    path.write_text(json.dumps(card, indent=2, sort_keys=True) + "\n")
    named = {PREFIX + name.replace(f".{NAME}.", "."): part for name, part in tensors.items()}
    save_file(named, folder / "adapter_model.safetensors", metadata={"format": "pt"})
