"""The policy's folder and its card, `policy.json`, which describes the policy to the rest of the
pipeline.

    {"source": "tiny", "location": null, "digest": "91c0...", "trust_remote_code": false,
     "architecture": "Qwen3ForCausalLM", "num_parameters": 438656, ..., "vocab_size": 100}

`policy/` contains the whole policy if it was made or converted here. For an external policy, it
contains only configuration and tokenizer: the weights stay at `location`, and are only read to
check them."""

from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from tasks.common.checksums import read_checked
from tasks.common.files import ArtifactError, whole_folder
from tasks.common.progress import progress
from tasks.models.folder import (
    DATA_FILES,
    as_mapping,
    check_folder,
    loading,
    policy_digest,
    weight_files,
)
from tasks.models.policy import (
    MODEL,
    check_tensors,
    copy_files,
    describe,
    load_tokenizer,
    read_policy,
    save_policy,
    stop_token_ids,
)
from tasks.policy.source import EMBEDDED

NUMBERS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
PIECE = 2**24  # numbers checked at once


def write_own(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path
) -> dict[str, Any]:
    """Save a policy made here to `folder`. Return its card."""
    with whole_folder(folder) as temporary:
        save_policy(model, tokenizer, temporary)
    return card("tiny", None, policy_digest(folder), False, describe(model))


def write_embedded(folder: Path) -> dict[str, Any]:
    """Copy the embedded policy to `folder`. Return its card."""
    embedded = read_policy(EMBEDDED)  # refuses damaged files
    with whole_folder(folder) as temporary:
        copy_files(("*",), embedded.folder, temporary)
    return read_checked(EMBEDDED.policy_card)


def write_external(
    source: str, location: Path, trust_remote_code: bool, folder: Path
) -> dict[str, Any]:
    """Check the policy at `location`, and copy the files that describe it to `folder`. Return its
    card."""
    described = checked(location, trust_remote_code)
    with whole_folder(folder) as temporary:
        copy_files({*DATA_FILES} - {"*.safetensors"}, location, temporary)
    return card(source, str(location), policy_digest(location), trust_remote_code, described)


def checked(location: Path, trust_remote_code: bool) -> dict[str, Any]:
    """Return `describe` of the model at `location`. Raise ArtifactError if it cannot be used."""
    check_folder(location)
    with loading(location, MODEL):
        described = describe(skeleton(location, trust_remote_code))
        check_shapes(location, trust_remote_code)
    tokenizer = load_tokenizer(location, trust_remote_code=trust_remote_code)
    stop_token_ids(location, tokenizer)
    check_numbers(location)
    return described


def card(
    source: str, location: str | None, digest: str, trusted: bool, described: dict[str, Any]
) -> dict[str, Any]:
    """Return the content of `policy.json`."""
    origin = {
        "source": source,
        "location": location,
        "digest": digest,
        "trust_remote_code": trusted,
    }
    return {**origin, **described}


def skeleton(location: Path, trust_remote_code: bool) -> PreTrainedModel:
    """Return the model without weights: its shapes on torch's meta device, which uses no memory."""
    trusted = trust_remote_code
    config = AutoConfig.from_pretrained(location, trust_remote_code=trusted)  # nosec B615
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(  # type: ignore[no-any-return]
            config, trust_remote_code=trusted
        )


def check_shapes(location: Path, trust_remote_code: bool) -> None:
    """Raise ArtifactError if a tensor is missing from the files, or has another shape. Tensors are
    matched as in loading, but on the meta device, so that only headers are read. Quantised policies
    are not checked, because their tensors have other names and shapes."""
    if "quantization_config" in as_mapping(location / "config.json"):
        return
    loaded: Any = AutoModelForCausalLM.from_pretrained(  # nosec B615  # a folder on this machine
        location,
        device_map={"": "meta"},
        use_safetensors=True,
        trust_remote_code=trust_remote_code,
        output_loading_info=True,
        ignore_mismatched_sizes=True,
    )
    check_tensors(location, loaded[1])


def check_numbers(location: Path) -> None:
    """Raise ArtifactError if a weight of 16 or more bits is not finite: sampling would fail."""
    with progress(None, "check weights", "number") as bar:
        for path in weight_files(location):
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118  # not a mapping
                    tensor = file.get_tensor(name)
                    if tensor.dtype in NUMBERS and not all(
                        part.isfinite().all() for part in tensor.flatten().split(PIECE)
                    ):
                        raise ArtifactError(
                            f"{path}: {name} contains NaN or infinity: the policy's training "
                            "diverged, or the file is damaged. Use another checkpoint"
                        )
                    bar.update(tensor.numel())
