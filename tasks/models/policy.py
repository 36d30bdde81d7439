"""A policy on disk: its digest, its FLOPs figures, and its loading.

A policy is any Hugging Face causal language model in safetensors form (tasks/models/folder.py).
Code that comes with a model runs only if the user sets `policy.trust_remote_code`."""

import shutil
import string
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as distributed
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.pytorch_utils import Conv1D
from transformers.quantizers.auto import AutoHfQuantizer
from transformers.utils import logging as transformers_logging

from tasks.common.accounting.ledger import Architecture
from tasks.common.artifacts import Layout
from tasks.common.checksums import read_checked
from tasks.common.files import ArtifactError, write_json
from tasks.models.folder import (
    POLICY_FILES,
    as_mapping,
    check_folder,
    check_tokenizer,
    loading,
    policy_digest,
    trained_digest,
)
from tasks.models.packing import ATTENTION

MODEL = "the model that config.json describes"
# the names that models use for the number of experts in a layer, and of those that a token uses
EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
ACTIVE_EXPERTS = ("num_experts_per_tok", "moe_topk", "top_k_experts")
TOKENIZER = "the tokenizer (tokenizer.json, tokenizer_config.json)"
transformers_logging.disable_progress_bar()  # the stage has its own progress bar


@dataclass(frozen=True)
class Policy:
    """A policy that can be loaded: folder, digest, and the sizes that determine its FLOPs."""

    folder: Path
    digest: str
    architecture: Architecture
    max_length: int
    vocab_size: int  # rows of its embedding
    trust_remote_code: bool


def read_policy(layout: Layout) -> Policy:
    """Return the initial policy that the stage `policy` made or named. Raise ArtifactError if its
    files have changed since that stage."""
    card = read_checked(layout.policy_card)
    folder = layout.policy if card["location"] is None else Path(card["location"])
    if policy_digest(folder) != card["digest"]:
        raise ArtifactError(
            f"the policy in {folder} has changed since the stage `policy` read or made it "
            f"({card['digest']}): restore its files, or run that stage and all stages "
            "that depend on it again (make run ARGS='--force policy')"
        )
    return open_policy(folder, card["digest"], card)


def read_trained(layout: Layout, recipe: str, seed: int) -> Policy:
    """Return the policy that a recipe and a seed trained. Raise the errors of `trained_digest`."""
    digest = trained_digest(layout, recipe, seed)
    folder = layout.train(recipe, seed) / "policy"
    return open_policy(folder, digest, read_checked(layout.policy_card))


def open_policy(folder: Path, digest: str, card: dict[str, Any]) -> Policy:
    """Return the policy in `folder` with the FLOPs figures of `card` (a trained policy has the same
    figures as its initial policy)."""
    check_folder(folder)
    sizes, trusted = architecture_of(card), card["trust_remote_code"]
    return Policy(folder, digest, sizes, card["max_length"], card["vocab_size"], trusted)


def architecture_of(card: dict[str, Any]) -> Architecture:
    """Return the numbers in a policy's card that determine its FLOPs."""
    return Architecture(**{name: card[name] for name in Architecture.__dataclass_fields__})


def describe(model: PreTrainedModel) -> dict[str, Any]:
    """Return a model's entries in `policy.json`: its class and sizes, and numbers for its FLOPs.
    Raise ArtifactError for a model without attention, without a limit on its context, or with
    layers that differ in the size of their heads."""
    config = model.config.get_text_config()
    try:
        heads, max_length = config.num_attention_heads, config.max_position_embeddings
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    except (AttributeError, RuntimeError) as error:
        reason = str(error).partition(". ")[0]
        raise ArtifactError(
            f"{type(model).__name__} is not supported ({reason}): use another architecture"
        ) from error
    head = model.get_output_embeddings()
    linear = sum(
        m.weight.numel() for m in model.modules() if isinstance(m, torch.nn.Linear | Conv1D)
    )
    num, active = (first_number(config, names) for names in (EXPERTS, ACTIVE_EXPERTS))
    experts = sum(
        p.numel()
        for name, p in model.named_parameters()
        if p.ndim == 3 and ("expert" in name or p.shape[0] == num > 1)  # of JetMoe
    )
    return {
        "architecture": type(model).__name__,
        "num_parameters": sum(p.numel() for p in model.parameters()),
        "num_matmul_parameters": int(linear + experts * active / num),
        "num_head_parameters": head.weight.numel(),
        "num_layers": config.num_hidden_layers,
        "attention_width": heads * head_dim,
        "max_length": max_length,
        "vocab_size": config.vocab_size,
    }


def first_number(config: Any, names: Sequence[str]) -> int:
    """Return the first positive integer under one of `names` in a configuration, 1 if none is."""
    found = (getattr(config, name, None) for name in names)
    return next((value for value in found if isinstance(value, int) and value > 0), 1)


def load_model(
    folder: Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    trust_remote_code: bool = False,
    shard: Callable[[PreTrainedModel], object] | None = None,
    renamed: dict[str, str] | None = None,
) -> PreTrainedModel:
    """Load the model in `folder` in evaluation mode: without dropout, regardless of its config.
    `shard` shards the model before it has weights; every rank then reads only its own rows. If it
    also adds adapters, their values are left unset, and `renamed` maps patterns of tensor names in
    the files to those in the model. Raise ArtifactError if a tensor is missing from the files or
    has another shape, or if there is no GPU for `device`."""
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ArtifactError("engine.device is cuda, but torch finds no GPU: set it to auto or cpu")
    check_folder(folder)
    trusted, kinds = trust_remote_code, (ImportError, ValueError)  # errors of quantised policies
    with loading(folder, MODEL, kinds), sharded_by(shard) as options:
        check_quantization(folder)
        loaded: Any = AutoModelForCausalLM.from_pretrained(  # nosec B615  # of this machine
            folder,
            dtype=dtype,
            use_safetensors=True,
            trust_remote_code=trusted,
            output_loading_info=True,
            ignore_mismatched_sizes=True,  # check_tensors names them
            key_mapping=renamed,
            **options,
        )
    model, loading_info = loaded
    if renamed:
        loading_info["missing_keys"] = [
            name for name in loading_info["missing_keys"] if ".lora_" not in name
        ]
    check_tensors(folder, loading_info)
    model.set_attn_implementation(ATTENTION)  # unless its class can use only its own
    if renamed:  # only here: the policy is saved under the names in its files
        model._weight_conversions = model._weight_conversions[len(renamed) :]
    return model.to(device).eval()  # type: ignore[no-any-return]


@contextmanager
def sharded_by(shard: Callable[[PreTrainedModel], object] | None) -> Iterator[dict[str, Any]]:
    """Yield options with which transformers shards a model by `shard` and reads only this rank's
    rows. transformers' own plan of groups would leave the output head gathered after a forward."""
    if shard is None:
        yield {}
        return

    def distribute(model: PreTrainedModel, *_: object) -> PreTrainedModel:
        shard(model)
        return model

    with mock.patch.object(PreTrainedModel, "maybe_distribute_model", distribute):
        yield {"distributed_config": DistributedConfig(fsdp_size=distributed.get_world_size())}


def check_quantization(folder: Path) -> None:
    """Raise ArtifactError for a quantisation that transformers does not support: it would interpret
    the tensors as unquantised weights."""
    settings = as_mapping(folder / "config.json").get("quantization_config")
    if settings and not AutoHfQuantizer.supports_quant_method(settings):
        raise ArtifactError(
            f"{folder / 'config.json'}: transformers does not support the quantisation "
            f"{settings.get('quant_method')!r}: use a policy that is not quantised, or evaluate "
            "this one with an engine that supports it (engine.name: vllm)"
        )


def check_tensors(folder: Path, loading_info: dict[str, Any]) -> None:
    """Raise ArtifactError if a tensor that the configuration requires is missing from a policy's
    files, or has another shape there. `loading_info` is transformers' `output_loading_info`."""
    if missing := sorted(loading_info["missing_keys"]):
        raise ArtifactError(
            f"{folder}: its files have no {missing[0]}"
            + (f" and {len(missing) - 1} more of its tensors" if len(missing) > 1 else "")
            + ": they would be random. Fetch or save the model again"
        )
    if other := sorted(loading_info["mismatched_keys"]):
        name, held, expected = other[0]
        raise ArtifactError(
            f"{folder}: {name} has shape {tuple(held)}, but config.json requires "
            f"{tuple(expected)}: they are of different models. Fetch or save the model again"
        )


def load_tokenizer(folder: Path, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Load the tokenizer in `folder`. Raise ArtifactError if there is none, or it cannot be
    loaded, is empty, or has no end-of-sequence token."""
    check_tokenizer(folder)
    trusted = trust_remote_code
    with loading(folder, TOKENIZER):
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trusted)  # nosec B615
        is_empty = not tokenizer(string.printable, add_special_tokens=False).input_ids
    if is_empty:
        raise ArtifactError(
            f"{folder / 'tokenizer.json'}: the tokenizer has no tokens for text: fetch or save the "
            "policy again"
        )
    if tokenizer.eos_token_id is None:
        raise ArtifactError(
            f"{folder}: the tokenizer has no eos_token, so no completion could end: set one"
        )
    return tokenizer  # type: ignore[no-any-return]


def stop_token_ids(folder: Path, tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Return the sorted ids of all stop tokens, from the tokenizer and generation_config.json."""
    path = folder / "generation_config.json"
    listed = as_mapping(path).get("eos_token_id") if path.is_file() else None
    listed = listed if isinstance(listed, list) else [listed] if listed is not None else []
    if not all(isinstance(one, int) for one in listed):
        raise ArtifactError(
            f"{path}: eos_token_id is {listed}; it can be a number, or a list of them"
        )
    return tuple(sorted({int(tokenizer.eos_token_id), *listed}))


def save_policy(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path) -> None:
    """Write a policy that any Hugging Face program can load. Tied weights are saved once, as
    transformers expects."""
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def save_trained(model: PreTrainedModel, initial: Path, folder: Path) -> None:
    """Write a trained policy: its weights and config.json are saved, and all other files are copied
    from `initial`. transformers could save a different tokenizer or other stop tokens than it read,
    or save nothing, because it reads some generation_config.json files that it refuses to save."""
    folder.mkdir(parents=True)
    copy_files({*POLICY_FILES} - {"*.safetensors"}, initial, folder)
    for path in folder.glob("*.index.json"):
        path.unlink()
    with mock.patch.object(model, "can_generate", return_value=False):  # no generation_config.json
        model.save_pretrained(folder)
    saved, before = (as_mapping(each / "config.json") for each in (folder, initial))
    version = before.get("transformers_version")  # some tokenizers are corrected if it is old
    write_json(folder / "config.json", saved | {"transformers_version": version})


def copy_files(patterns: Iterable[str], source: Path, folder: Path) -> None:
    """Copy the files in `source` that match `patterns` to `folder`."""
    for path in sorted({p for pattern in patterns for p in source.glob(pattern) if p.is_file()}):
        target = folder / path.relative_to(source)
        target.parent.mkdir(exist_ok=True)
        shutil.copyfile(path, target)


def torch_device(name: str) -> torch.device:
    """Return torch's device `name`. `auto` is the GPU if there is one, else the CPU."""
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def torch_dtype(name: str) -> torch.dtype:
    """Return torch's type for `float32`, `bfloat16` or `float16`."""
    return {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}[name]
