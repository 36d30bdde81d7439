"""Files that appear whole or not at all, and digests of what is in them.

Writes go to a temporary name, are flushed to the disk and then renamed: a reader sees the old file
or the new one, never half of one."""

import hashlib
import json
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from tasks.common import disk


class ArtifactError(ValueError):
    """A file of the pipeline is missing, or is not what its stage promised."""


class WriteError(ArtifactError, OSError):
    """A place takes no more writes; the message says why and what to do."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn what a full disk, a read-only file system and the like raise inside the block, from
    whatever library, into a WriteError about `path`."""
    try:
        yield
    except WriteError:
        raise
    except Exception as error:
        said = disk.explain(error, path)
        if said is None:
            raise
        raise WriteError(said) from error


def require_writable(folder: Path) -> None:
    """Raise WriteError unless `folder`, or the folder it would be made in, takes a small file."""
    try:
        disk.try_writing(folder)
    except OSError as error:
        why = disk.reason(error) or f"{error.strerror}: make it, or name another place"
        raise WriteError(disk.sentence(folder, why)) from error


def replace_file(path: Path, write: Callable[[BinaryIO], Any]) -> None:
    """Call `write` on a temporary file beside `path`, flush it to the disk, and rename it to
    `path`."""
    with temporary_file(path, write) as temporary:
        os.replace(temporary, path)
    sync_folder(path.parent)


def create_file(path: Path, write: Callable[[BinaryIO], Any]) -> bool:
    """As `replace_file`, but only where there is no `path` yet; False where there is. Of several at
    once one wins."""
    with temporary_file(path, write) as temporary:
        try:
            os.link(temporary, path)
        except FileExistsError:
            return False
        except OSError as error:
            raise ArtifactError(
                f"{path.parent}: this file system has no hard links ({error}); use another"
            ) from error
    sync_folder(path.parent)
    return True


@contextmanager
def temporary_file(path: Path, write: Callable[[BinaryIO], Any]) -> Iterator[Path]:
    """A flushed file beside `path` with what `write` wrote; gone afterwards, unless it was
    renamed."""
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with writing(path), os.fdopen(descriptor, "w+b") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(name, 0o644)
        yield Path(name)
    finally:
        Path(name).unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Flush a folder's entries, so that a rename in it survives a power cut."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_json(path: Path, value: Any) -> None:
    """Write `value` as sorted, indented JSON, whole or not at all."""
    text = json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n"
    replace_file(path, lambda file: file.write(text.encode()))


def read_json(path: Path) -> Any:
    """Read JSON; ArtifactError names the file when it is missing or damaged."""
    try:
        return json.loads(path.read_text())
    except FileNotFoundError as error:
        raise ArtifactError(f"{path} does not exist: run the stage that makes it first") from error
    except ValueError as error:
        raise ArtifactError(f"{path} is not JSON: {error}") from error


def digest(value: Any) -> str:
    """16 hex digits that name a JSON-like value: equal values, equal digests."""
    return hashlib.sha256(
        json.dumps(value, sort_keys=True, ensure_ascii=False).encode()
    ).hexdigest()[:16]


def digest_file(path: Path) -> str:
    """16 hex digits of a file's content; ArtifactError when it is not there."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()[:16]
    except FileNotFoundError as error:
        raise ArtifactError(f"{path} does not exist: run the stage that makes it first") from error


def digest_folder(folder: Path, patterns: Iterable[str] = ("**/*",)) -> str:
    """16 hex digits of the names and contents of the files in `folder` that match one of
    `patterns`."""
    files = sorted(
        {path for pattern in patterns for path in folder.glob(pattern) if path.is_file()}
    )
    return digest([[path.relative_to(folder).as_posix(), digest_file(path)] for path in files])
