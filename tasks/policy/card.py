"""The policy's folder and its card, `policy.json`, which describes the policy to the rest of the
pipeline.

    {"source": "tiny", "location": null, "digest": "91c0...", "trust_remote_code": false,
     "architecture": "Qwen3ForCausalLM", "num_parameters": 438656, ..., "vocab_size": 100}

A policy made here is complete in `policy/`. Of an external policy only configuration and tokenizer
are copied there: the weights stay at `location`, and are not loaded to describe them."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from tasks.common.files import sync_folder
from tasks.common.stage import StageError
from tasks.models.folder import check_folder, policy_digest
from tasks.models.policy import describe, load_tokenizer, save_policy

# files of an external policy that are copied
DESCRIPTIVE_FILES = ("*.json", "*.jinja", "*.txt", "*.model")


def write_own(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, folder: Path
) -> dict[str, Any]:
    """Save a policy made here to `folder`. Return its card."""
    with whole_folder(folder) as temporary:
        save_policy(model, tokenizer, temporary)
    return card("tiny", None, policy_digest(folder), False, model)


def write_external(
    source: str, location: Path, trust_remote_code: bool, folder: Path
) -> dict[str, Any]:
    """Check the policy at `location` and copy the files that describe it to `folder`. Return its
    card."""
    check_folder(location)
    load_tokenizer(location, trust_remote_code=trust_remote_code)
    model = skeleton(location, trust_remote_code)
    with whole_folder(folder) as temporary:
        found = {path for pattern in DESCRIPTIVE_FILES for path in location.glob(pattern)}
        for path in sorted(found):
            shutil.copyfile(path, temporary / path.name)
    return card(source, str(location), policy_digest(location), trust_remote_code, model)


def card(
    source: str, location: str | None, digest: str, trusted: bool, model: PreTrainedModel
) -> dict[str, Any]:
    """Return the content of `policy.json`."""
    origin = {
        "source": source,
        "location": location,
        "digest": digest,
        "trust_remote_code": trusted,
    }
    return {**origin, **describe(model)}


def skeleton(location: Path, trust_remote_code: bool) -> PreTrainedModel:
    """Return the model without weights: shapes on torch's meta device, which take no memory."""
    try:
        config = AutoConfig.from_pretrained(location, trust_remote_code=trust_remote_code)
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(  # type: ignore[no-any-return]
                config, trust_remote_code=trust_remote_code
            )
    except (ValueError, KeyError) as error:
        raise StageError(
            f"{location} does not hold a causal language model that transformers can build: "
            f"{error}. Check policy.source and policy.trust_remote_code"
        ) from error


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder that replaces `folder` if the block succeeds. Until then the old one
    stays."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}.") as scratch:
        new = Path(scratch) / "new"
        old = Path(scratch) / "old"
        new.mkdir()
        yield new
        # the files reach the disk before the folder gets its name
        for path in new.iterdir():
            path.chmod(0o644)
            with path.open("rb") as file:
                os.fsync(file.fileno())
        if folder.exists():
            os.rename(folder, old)
        os.rename(new, folder)
    sync_folder(folder.parent)
