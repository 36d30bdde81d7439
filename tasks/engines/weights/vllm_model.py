"""What some of vLLM's models need when they get new weights."""

import torch
from transformers import PreTrainedModel

from tasks.common.files import ArtifactError

HEAD = "lm_head"
# model types whose new experts vLLM 0.32 drops without an error
KEEP_EXPERTS = {"gpt_oss"}


def check_updates(model: PreTrainedModel) -> None:
    """Raise ArtifactError for a policy of which vLLM would keep some of the old weights."""
    if model.config.model_type in KEEP_EXPERTS:
        raise ArtifactError(
            f"vLLM 0.32 keeps the old experts of a {model.config.model_type} model when it gets "
            "new weights, so it cannot sample in training: take a policy of another architecture"
        )


def has_head(model: torch.nn.Module) -> bool:
    """Whether a vLLM model has a module for its output head. Gemma 2 has none: it uses its
    embeddings, and refuses a weight of that name."""
    return any(name.rpartition(".")[2] == HEAD for name, _ in model.named_modules())


def pack_experts(model: torch.nn.Module) -> None:
    """Pack the experts of a vLLM model for the kernel of a CPU.

    vLLM 0.32 packs them when it loads them first. Those of an update it copies over the packed ones
    as they are, and every log-probability is wrong, also when the weights have not changed. A
    version that packs them itself would do so twice with this: the probe after an update fails."""
    for layer in model.modules():
        kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
        if kernel is not None:
            kernel.fused_experts.process_weights_after_loading(layer)
