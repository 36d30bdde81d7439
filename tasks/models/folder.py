"""A policy's folder: what it may hold, and its digest, which covers everything that is loaded.

Pickled weights are refused, because unpickling runs code; so is whatever would lead the loader out
of the folder: an index or a setting that names another place, a link, an adapter's base model."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from tasks.common.files import ArtifactError, digest_folder, read_json
from tasks.common.layout import Layout
from tasks.common.remedy import remedy
from tasks.common.sealed import read_sealed

DATA_FILES = (
    "*.safetensors",
    "*.json",
    "*.jinja",
    "*.txt",
    "*.model",
    "additional_chat_templates/*.jinja",
)
POLICY_FILES = (*DATA_FILES, "*.py")
OBJECTS = (  # what libraries read as JSON objects
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
)
MAX_REASON = 300  # characters of what a library says
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
PLAIN_WEIGHTS = re.compile(r"[^/\\]+\.safetensors")
EXPLICIT_WEIGHTS = re.compile(r"[^/\\]+\.safetensors(\.index\.json)?")


def check_folder(folder: Path) -> None:
    """Raise ArtifactError unless `folder` holds a Hugging Face causal LM with safetensors weights,
    and nothing in it leads out of it."""
    if not (folder / "config.json").is_file():
        raise ArtifactError(f"{folder} is not a policy: it has no config.json")
    check_links(folder)
    check_weights(folder)
    for path in sorted(folder.glob("*.index.json")):
        check_index(path)
    config = as_mapping(folder / "config.json")
    explicit = config.get("transformers_weights")
    if explicit is not None and not is_plain(explicit, EXPLICIT_WEIGHTS, folder):
        raise ArtifactError(
            f"{folder / 'config.json'}: transformers_weights is {explicit!r}; it can only name a "
            "*.safetensors file beside it. Remove the key, or save the model again"
        )
    if not isinstance(config.get("quantization_config"), dict | None):
        raise ArtifactError(
            f"{folder / 'config.json'}: quantization_config is not a JSON object: remove the key, "
            "or save the model again"
        )
    if (folder / "adapter_config.json").exists():
        raise ArtifactError(
            f"{folder} holds an adapter (adapter_config.json), whose base model is elsewhere: "
            "merge it into its base model (peft's merge_and_unload) and save that"
        )


@contextmanager
def loading(
    folder: Path, what: str, kinds: tuple[type[Exception], ...] = (Exception,)
) -> Iterator[None]:
    """Turn whatever a library raises at the files of a policy into one sentence (ArtifactError)
    that names the file at fault, as far as it can be told. `what` is what is loaded of them."""
    try:
        yield
    except ArtifactError:
        raise
    except kinds as error:
        for path in filter(Path.exists, map(folder.joinpath, OBJECTS)):
            if "auto_map" in as_mapping(path) and "trust_remote_code" in str(error):
                raise ArtifactError(
                    f"{path} names Python code that comes with the policy (auto_map), which is not "
                    f"run, and {what} cannot be loaded without it: set policy.trust_remote_code to "
                    "true if you trust it, or take another policy"
                ) from error
        why = f"{type(error).__name__}: {' '.join(str(error).split())}"[:MAX_REASON]
        raise ArtifactError(
            f"{folder}: {what} cannot be loaded ({why}): check policy.source, or fetch or save the "
            "policy again"
        ) from error


def check_weights(folder: Path) -> None:
    """Raise ArtifactError for a folder without safetensors, or with a file that is damaged or was
    cut short."""
    if weights := sorted(folder.glob("*.safetensors")):
        for path in weights:
            shapes_in(path)
        return
    pickled = sorted(path.name for pattern in PICKLED for path in folder.glob(pattern))
    if pickled:
        raise ArtifactError(
            f"{folder} holds pickled weights only ({', '.join(pickled[:3])}), and unpickling runs "
            "code. If you trust them, convert them: "
            "AutoModelForCausalLM.from_pretrained(...).save_pretrained(NEW_FOLDER)"
        )
    raise ArtifactError(f"{folder} has no *.safetensors file: it is not a complete policy")


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that are loaded of a policy: those that its index names, the one of the
    usual name, or else all."""
    index, usual = folder / "model.safetensors.index.json", folder / "model.safetensors"
    if index.exists():
        return sorted({folder / name for name in as_mapping(index)["weight_map"].values()})
    return [usual] if usual.exists() else sorted(folder.glob("*.safetensors"))


def shapes_in(path: Path) -> dict[str, list[int]]:
    """The shape of every tensor in a safetensors file, by its header. Raises ArtifactError where it
    has none, or not one that the file fits byte for byte."""
    try:
        with safe_open(path, framework="numpy") as file:
            return {name: file.get_slice(name).get_shape() for name in list(file.keys())}
    except SafetensorError as error:
        raise ArtifactError(
            f"{path} is no safetensors file, or is damaged ({error}): fetch or save the model again"
        ) from error


def check_index(path: Path) -> None:
    """Raise ArtifactError unless an index of weights names nothing but *.safetensors files beside
    it."""
    files = as_mapping(path).get("weight_map")
    if not isinstance(files, dict):
        raise ArtifactError(f"{path} has no weight_map: it is not an index of weights")
    for tensor, name in files.items():
        if not is_plain(name, PLAIN_WEIGHTS, path.parent):
            raise ArtifactError(
                f"{path}: {tensor} is in {name!r}; an index can only name *.safetensors files that "
                "stand beside it. Save the model again, or fetch the files that are missing"
            )


def is_plain(name: Any, pattern: re.Pattern[str], folder: Path) -> bool:
    """Whether `name` is that of a file in `folder`, without any path."""
    return isinstance(name, str) and bool(pattern.fullmatch(name)) and (folder / name).is_file()


def as_mapping(path: Path) -> dict[str, Any]:
    """The JSON object in a file."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise ArtifactError(f"{path} is not a JSON object: it is damaged, or not of a model")
    return value


def check_links(folder: Path) -> None:
    """Raise ArtifactError for a link that leaves the folder. In the Hugging Face cache, files are
    links from snapshots/REVISION to the blobs of the same model."""
    own = folder.resolve()
    roots = [own, own.parents[1] / "blobs"] if own.parent.name == "snapshots" else [own]
    for path in policy_files(folder):
        target = path.resolve()
        if not any(target.is_relative_to(root) for root in roots):
            raise ArtifactError(
                f"{path} is a link to {target}, outside the policy's folder: put a copy in its "
                "place, or remove it"
            )


def policy_files(folder: Path) -> Iterator[Path]:
    """What is read of a policy, links included."""
    for pattern in POLICY_FILES:
        yield from sorted(folder.glob(pattern))


def policy_digest(folder: Path) -> str:
    """16 hex digits of weights, configuration and tokenizer (the chat templates count)."""
    return digest_folder(folder, POLICY_FILES)


def trained_digest(layout: Layout, recipe: str, seed: int) -> str:
    """The digest of the policy that a recipe and a seed trained. Raises ArtifactError where its
    files are not those that training wrote."""
    folder = layout.train(recipe, seed) / "policy"
    digest = str(read_sealed(layout.trained_card(recipe, seed))["digest"])
    if policy_digest(folder) != digest:
        raise ArtifactError(
            f"the trained policy in {folder} is not what training wrote ({digest}). "
            f"{remedy(folder)}"
        )
    return digest
