"""The folder of one checkpoint: reading and verifying its content."""

import re
from pathlib import Path
from typing import Any

import polars as pl

from tasks.common.checksums import CheckedValues, DamagedError, decode
from tasks.common.files import ArtifactError, digest_file
from tasks.train.checkpoint.tensors import SavedTensors

BRANCH = "-branch"  # the suffix of a branch's checkpoint
NAME = re.compile(rf"step-\d+-\d+({BRANCH})?")

Loaded = tuple[SavedTensors, dict[str, Any], dict[str, pl.DataFrame]]


def read_checkpoint(folder: Path) -> tuple[Loaded, list[str]]:
    """Return a checkpoint's tensors, state and tables, and the names of its rollout parts. Raise
    ArtifactError if a file was changed after it was written."""
    index = verified_index(folder)
    files = [folder / name for name in index["files"]]
    tables = {path.stem: pl.read_parquet(path) for path in files if path.suffix == ".parquet"}
    tensors = SavedTensors([path for path in files if path.suffix == ".safetensors"])
    return (tensors, index["state"], tables), index["parts"]


def verified_index(folder: Path) -> dict[str, Any]:
    """Return the content of a checkpoint's `state.json`. Raise ArtifactError if this
    file, or a file or a part of the rollouts that it lists, is missing or was changed."""
    index = read_index(folder)
    for name, value in index["files"].items():
        verify(folder / name, value)
    for name in index["parts"]:
        verify(folder.parent / name, name.removesuffix(".parquet")[-16:])
    return index


def verify(path: Path, expected: str) -> None:
    """Raise ArtifactError unless a file has the digest that it had when it was written."""
    if not path.exists():
        raise ArtifactError(f"{path.name} is missing")
    if digest_file(path) != expected:
        raise ArtifactError(f"{path.name} was changed after it was written")


def read_index(folder: Path) -> dict[str, Any]:
    """Return the content of a checkpoint's `state.json`. Raise ArtifactError if it is missing or
    damaged."""
    try:
        return CheckedValues(folder / "state.json", decode((folder / "state.json").read_bytes()))
    except DamagedError as error:
        raise ArtifactError(f"state.json {error}") from error
    except OSError as error:
        raise ArtifactError(f"state.json cannot be read: {error}") from error


def read_parts(folder: Path) -> list[str]:
    """Return the names of the parts that a checkpoint needs; none if it is unreadable."""
    try:
        return list(read_index(folder)["parts"])
    except ArtifactError:
        return []


def checkpoints_in(folder: Path) -> list[Path]:
    """Return the folders of complete checkpoints in order of writing, without a user's copies."""
    return sorted((p for p in folder.glob("step-*") if NAME.fullmatch(p.name)), key=sequence)


def is_branch(folder: Path) -> bool:
    """Return whether a checkpoint belongs to a branch."""
    return folder.name.endswith(BRANCH)


def trunk_of(folder: Path) -> Path:
    """Return the newest checkpoint of the trunk that is not newer than `folder`: `folder` itself,
    or the one from which its branch started. Raise ArtifactError if there is none."""
    for other in reversed(checkpoints_in(folder.parent)):
        if not is_branch(other) and sequence(other) <= sequence(folder):
            return other
    raise ArtifactError(f"the trunk's checkpoint before the branch of {folder.name} is missing")


def sequence(folder: Path) -> int:
    """Return a checkpoint's position in the order of writing."""
    return int(folder.name.split("-")[2])
