"""The folder of one checkpoint: what it holds, and whether that is what was written."""

from pathlib import Path
from typing import Any

import polars as pl

from tasks.common.files import ArtifactError, digest_file
from tasks.common.seal import DamagedError
from tasks.common.sealed import Sealed, decode
from tasks.train.checkpoint.tensors import SavedTensors, Tensors, is_tensors

BRANCH = "-branch"  # the end of the name of a branch's checkpoint

Loaded = tuple[Tensors, dict[str, Any], dict[str, pl.DataFrame]]


def read_checkpoint(folder: Path) -> tuple[Loaded, list[str]]:
    """A checkpoint's tensors, state and tables, and the names of the rollout parts beside it;
    ArtifactError when a file is not what was written."""
    index = verified_index(folder)
    tables = {
        Path(name).stem: pl.read_parquet(folder / name)
        for name in index["files"]
        if name.endswith(".parquet")
    }
    tensors = SavedTensors([folder / name for name in index["files"] if is_tensors(name)])
    return (tensors, index["state"], tables), index["parts"]


def verified_index(folder: Path) -> dict[str, Any]:
    """What `state.json` of a checkpoint holds, all files and parts of rollouts that it names being
    what was written."""
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
        raise ArtifactError(f"{path.name} is not what was written")


def read_index(folder: Path) -> dict[str, Any]:
    """What `state.json` of a checkpoint holds; ArtifactError where it is missing or damaged."""
    try:
        return Sealed(folder / "state.json", decode((folder / "state.json").read_bytes()))
    except DamagedError as error:
        raise ArtifactError(f"state.json {error}") from error
    except OSError as error:
        raise ArtifactError(f"state.json cannot be read: {error}") from error


def read_parts(folder: Path) -> list[str]:
    """The names of the parts that a checkpoint needs; none where it is too damaged to say."""
    try:
        return list(read_index(folder)["parts"])
    except ArtifactError:
        return []


def checkpoints_in(folder: Path) -> list[Path]:
    """The folders of complete checkpoints, in the order in which they were written."""
    return sorted(folder.glob("step-*"), key=sequence)


def is_branch(folder: Path) -> bool:
    """Whether a checkpoint is a branch's."""
    return folder.name.endswith(BRANCH)


def trunk_of(folder: Path) -> Path:
    """The trunk's newest checkpoint that is not newer than a checkpoint: itself, or that which its
    branch left. Raises ArtifactError where there is none."""
    for other in reversed(checkpoints_in(folder.parent)):
        if not is_branch(other) and sequence(other) <= sequence(folder):
            return other
    raise ArtifactError(f"the trunk's checkpoint is missing, to which {folder.name} goes back")


def sequence(folder: Path) -> int:
    """A checkpoint's place in the order of writing."""
    return int(folder.name.split("-")[2])
