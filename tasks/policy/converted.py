"""A policy in one GGUF file, converted to an ordinary Hugging Face folder.

transformers restores quantised weights to float32. The folder contains these, so the file is read
only once."""

import re
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from gguf import GGUFReader
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES

from tasks.common.files import ArtifactError, digest_file, whole_folder
from tasks.models.folder import loading, policy_digest
from tasks.models.policy import MODEL, TOKENIZER, check_tensors
from tasks.policy.card import card, checked
from tasks.policy.source import locate


def write_converted(source: str, folder: Path) -> dict[str, Any]:
    """Convert the GGUF file `source` to the policy in `folder`. Return its card."""
    with whole_folder(folder) as temporary:
        origin = convert(source, temporary)
        sizes = checked(temporary, False)
    return {**card(source, None, policy_digest(folder), False, sizes), **origin}


def convert(source: str, folder: Path) -> dict[str, Any]:
    """Write the policy in the GGUF file `source` to `folder`. Return where it is from, for its
    card: the digest of the file, its licence, and the precision of its weights. Raise ArtifactError
    for a file that is cut, without a tokenizer, or of an unknown architecture."""
    path = locate(source)
    origin = described(path)
    with loading(path, TOKENIZER):
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)  # nosec B615
        tokenizer.save_pretrained(folder)
    with loading(path, MODEL):
        loaded: Any = AutoModelForCausalLM.from_pretrained(  # nosec B615  # a file of this machine
            path.parent,
            gguf_file=path.name,
            dtype=torch.float32,
            output_loading_info=True,
            ignore_mismatched_sizes=True,
        )
    check_tensors(path, loaded[1])
    unquantized(loaded[0]).save_pretrained(folder)
    return origin


def described(path: Path) -> dict[str, Any]:
    """Return the entries of the card that name the origin of the GGUF file `path`. Raise the errors
    of `convert` that its header reveals."""
    try:
        reader = GGUFReader(path)
        fields = {name: field.contents() for name, field in reader.fields.items() if field.data}
    except (ValueError, IndexError, KeyError) as error:
        raise ArtifactError(
            f"{path} is not a GGUF file, or is cut or damaged: fetch it again"
        ) from error
    if (architecture := fields.get("general.architecture")) not in GGUF_SUPPORTED_ARCHITECTURES:
        raise ArtifactError(
            f"{path} has the architecture {architecture!r}, which transformers does not read from "
            "GGUF files: use the model's Hugging Face folder"
        )
    if not fields.get("tokenizer.ggml.tokens"):
        raise ArtifactError(
            f"{path} has no tokenizer (tokenizer.ggml.tokens): use a complete GGUF file"
        )
    sizes = Counter[str]()
    for tensor in reader.tensors:
        sizes[tensor.tensor_type.name] += int(tensor.n_elements)
    [(kind, _)] = sizes.most_common(1)
    return {
        "source_digest": digest_file(path),
        "licence": fields.get("general.license"),
        "restored_from": f"{''.join(re.findall('[0-9]+', kind)[:1])}-bit weights ({kind})",
    }


def unquantized(model: PreTrainedModel) -> PreTrainedModel:
    """Return the same weights in a model without a mark of quantisation: transformers refuses to
    save one that has it, although the weights are restored."""
    weights, config = model.state_dict(), model.config
    del config.quantization_config
    with torch.device("meta"):
        plain: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    plain.load_state_dict(weights, assign=True)
    plain.tie_weights()
    plain.generation_config = model.generation_config
    return plain
