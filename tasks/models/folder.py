"""A policy's folder: its permitted files, and its digest, which covers all files that are loaded.

Pickled weights are rejected, because unpickling runs code. Indexes, settings and links that refer
to places outside the folder are rejected, too, as are adapters (their base model is elsewhere)."""

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from tasks.common.checksums import read_checked
from tasks.common.files import ArtifactError, digest_folder, read_json
from tasks.common.layout import Layout
from tasks.common.recovery import how_to_restore

DATA_FILES = (
    "*.safetensors",
    "*.json",
    "*.jinja",
    "*.txt",
    "*.model",
    "*.tiktoken",
    "additional_chat_templates/*.jinja",
)
POLICY_FILES = (*DATA_FILES, "*.py")
OBJECTS = (  # files that libraries read as JSON objects
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
)
MAX_REASON = 300  # characters of a library's message
VOCABULARIES = (
    *("tokenizer.json", "vocab.json", "vocab.txt", "tekken.json", "*.model", "*.tiktoken"),
)
PICKLED = ("*.bin", "*.pt", "*.pth", "*.ckpt")
PLAIN_WEIGHTS = re.compile(r"[^/\\]+\.safetensors")
EXPLICIT_WEIGHTS = re.compile(r"[^/\\]+\.safetensors(\.index\.json)?")


def check_folder(folder: Path) -> None:
    """Raise ArtifactError unless `folder` contains a Hugging Face causal LM with safetensors
    weights, and refers to nothing outside itself."""
    if not (folder / "config.json").is_file():
        raise ArtifactError(f"{folder} is not a policy: it has no config.json")
    check_links(folder)
    check_weights(folder)
    for path in sorted(folder.glob("*.index.json")):
        check_index(path)
    weight_files(folder)
    if not isinstance(as_mapping(folder / "config.json").get("quantization_config"), dict | None):
        raise ArtifactError(
            f"{folder / 'config.json'}: quantization_config is not a JSON object: remove the key, "
            "or save the model again"
        )
    if (folder / "adapter_config.json").exists():
        raise ArtifactError(
            f"{folder} contains an adapter (adapter_config.json), whose base model is elsewhere: "
            "merge it into its base model (peft's merge_and_unload) and save that"
        )


def check_tokenizer(folder: Path) -> None:
    """Raise ArtifactError for a folder without a tokenizer: transformers would create one with
    three tokens. A tokenizer with its own code is accepted: its tokens may be in any file."""
    path = folder / "tokenizer_config.json"
    if any(any(folder.glob(name)) for name in VOCABULARIES):
        return
    if not (path.is_file() and "auto_map" in as_mapping(path)):
        raise ArtifactError(
            f"{folder} has no tokenizer (none of {', '.join(VOCABULARIES)}): "
            "copy the tokenizer's files of its original model into it"
        )


def has_chat_template(folder: Path) -> bool:
    """Return whether a policy has a chat template."""
    path = folder / "tokenizer_config.json"
    is_inside = path.is_file() and bool(as_mapping(path).get("chat_template"))
    return is_inside or (folder / "chat_template.jinja").is_file()


@contextmanager
def loading(
    folder: Path, what: str, kinds: tuple[type[Exception], ...] = (Exception,)
) -> Iterator[None]:
    """Convert the errors (`kinds`) of a library that reads a policy's files to ArtifactErrors of
    one sentence, with the file at fault if possible. `what` is the name of the loaded object."""
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
                    "true if you trust it, or use another policy"
                ) from error
        why = f"{type(error).__name__}: {' '.join(str(error).split())}"[:MAX_REASON]
        raise ArtifactError(
            f"{folder}: {what} cannot be loaded ({why}): check policy.source, or fetch or save the "
            "policy again"
        ) from error


def check_weights(folder: Path) -> None:
    """Raise ArtifactError for a folder without safetensors files, or with a damaged or truncated
    one."""
    if weights := sorted(folder.glob("*.safetensors")):
        for path in weights:
            shapes_in(path)
        return
    pickled = sorted(path.name for pattern in PICKLED for path in folder.glob(pattern))
    if pickled:
        raise ArtifactError(
            f"{folder} contains only pickled weights ({', '.join(pickled[:3])}), and unpickling "
            "runs code. If you trust them, convert them: "
            "AutoModelForCausalLM.from_pretrained(...).save_pretrained(NEW_FOLDER)"
        )
    raise ArtifactError(f"{folder} has no *.safetensors file: it is not a complete policy")


def weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files to load a policy from. config.json may name one, or an index of
    several. Otherwise, return model.safetensors, else the files in the usual index, else all."""
    named = as_mapping(folder / "config.json").get("transformers_weights")
    if named is not None and not is_plain(named, EXPLICIT_WEIGHTS, folder):
        raise ArtifactError(
            f"{folder / 'config.json'}: transformers_weights is {named!r}; it can only name a "
            "*.safetensors file or an index beside it. Remove the key, or save the model again"
        )
    single = folder / (named or "model.safetensors")
    if single.exists() and single.suffix != ".json":
        return [single]
    index = single if named else folder / "model.safetensors.index.json"
    if not index.exists():
        return sorted(folder.glob("*.safetensors"))
    check_index(index)
    return sorted({folder / name for name in as_mapping(index)["weight_map"].values()})


def names_in(folder: Path) -> set[str]:
    """Return the names of the weights in a policy's files."""
    return {name for path in weight_files(folder) for name in shapes_in(path)}


def shapes_in(path: Path) -> dict[str, list[int]]:
    """Return the shape of every tensor in a safetensors file, from its header. Raise ArtifactError
    if the header is invalid, or does not match the file's length."""
    try:
        with safe_open(path, framework="numpy") as file:
            return {name: file.get_slice(name).get_shape() for name in list(file.keys())}
    except SafetensorError as error:
        raise ArtifactError(
            f"{path} is not a safetensors file, or is damaged ({error}): fetch or save the "
            "model again"
        ) from error


def num_parameters(folder: Path) -> int:
    """Return the number of parameters of a policy, from the headers of its files; 0 if it is not
    on this machine."""
    files = weight_files(folder) if (folder / "config.json").exists() else []
    return sum(math.prod(shape) for path in files for shape in shapes_in(path).values())


def check_index(path: Path) -> None:
    """Raise ArtifactError unless an index of weights names only *.safetensors files in its own
    folder."""
    files = as_mapping(path).get("weight_map")
    if not isinstance(files, dict):
        raise ArtifactError(f"{path} has no weight_map: it is not an index of weights")
    for tensor, name in files.items():
        if not is_plain(name, PLAIN_WEIGHTS, path.parent):
            raise ArtifactError(
                f"{path}: {tensor} is in {name!r}; an index can only name *.safetensors files "
                "beside it. Save the model again, or fetch the missing files"
            )


def is_plain(name: Any, pattern: re.Pattern[str], folder: Path) -> bool:
    """Return whether `name` is the bare name of a file in `folder`, and matches `pattern`."""
    return isinstance(name, str) and bool(pattern.fullmatch(name)) and (folder / name).is_file()


def as_mapping(path: Path) -> dict[str, Any]:
    """Return the JSON object in a file. Raise ArtifactError if it is not an object."""
    value = read_json(path)
    if not isinstance(value, dict):
        raise ArtifactError(f"{path} is not a JSON object: it is damaged, or not a model's file")
    return value


def check_links(folder: Path) -> None:
    """Raise ArtifactError for a link that leaves the folder. In the Hugging Face cache, links from
    snapshots/REVISION to the blobs of the same model are allowed."""
    own = folder.resolve()
    roots = [own, own.parents[1] / "blobs"] if own.parent.name == "snapshots" else [own]
    files = (path for pattern in POLICY_FILES for path in sorted(folder.glob(pattern)))
    for path in files:
        target = path.resolve()
        if not any(target.is_relative_to(root) for root in roots):
            raise ArtifactError(
                f"{path} is a link to {target}, outside the policy's folder: replace it with a "
                "copy, or remove it"
            )


def policy_digest(folder: Path) -> str:
    """Return 16 hex digits: the digest of weights, configuration, tokenizer, templates and code."""
    return digest_folder(folder, POLICY_FILES)


def trained_digest(layout: Layout, recipe: str, seed: int) -> str:
    """Return the digest of the policy that a recipe and a seed trained. Raise ArtifactError if its
    files have changed since training."""
    folder = layout.train(recipe, seed) / "policy"
    digest = str(read_checked(layout.trained_card(recipe, seed))["digest"])
    if policy_digest(folder) != digest:
        raise ArtifactError(
            f"the trained policy in {folder} is not what training wrote ({digest}). "
            f"{how_to_restore(folder)}"
        )
    return digest
