"""Special treatment of some of vLLM's models when they get new weights."""

import torch
from transformers import PreTrainedModel

from tasks.common.files import ArtifactError

HEAD = "lm_head"
# model types for which vLLM 0.32 drops new experts without an error
KEEP_EXPERTS = {"gpt_oss"}


def check_updates(model: PreTrainedModel) -> None:
    """Raise ArtifactError if vLLM would keep some old weights of a model of this type."""
    if model.config.model_type in KEEP_EXPERTS:
        raise ArtifactError(
            f"vLLM 0.32 keeps the old experts of a {model.config.model_type} model when it gets "
            "new weights, so it cannot sample in training: use a policy of another architecture"
        )


def has_head(model: torch.nn.Module) -> bool:
    """Return whether a vLLM model has a module for its output head. Gemma 2 has none: it uses its
    embeddings, and rejects a weight of that name."""
    return any(name.rpartition(".")[2] == HEAD for name, _ in model.named_modules())


def pack_experts(model: torch.nn.Module) -> None:
    """Pack the experts of a vLLM model for the CPU kernel.

    vLLM 0.32 packs experts at the first load only. In an update it copies unpacked experts over the
    packed ones, and every log-probability is wrong, even if the weights have not changed. If a
    later vLLM packs them in updates, they are packed twice, and the probe after an update fails."""
    for layer in model.modules():
        kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
        if kernel is not None:
            kernel.fused_experts.process_weights_after_loading(layer)
