"""Files that appear whole or not at all, and digests of what is in them.

Writes go to a temporary name, are flushed to the disk and then renamed: a reader sees the old file
or the new one, never half of one. A temporary file is locked for as long as its writer lives. What
a killed one left is removed by the next process that writes into the folder.

Modes follow the folder: in one that a group shares (group-writable or setgid) files and folders are
the group's as well, and in a private one they are private."""

import fcntl
import functools
import hashlib
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from tasks.common import disk

UNFINISHED = ".unfinished"  # the end of a temporary file's name
CONTENT = ".d"  # with this after it, the name of the folder that belongs to it


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
    with writing(path), held_file(path.parent, path.name) as (temporary, file):
        write(file)
        file.flush()
        os.fsync(file.fileno())
        follow_folder(temporary, 0o644)
        yield temporary


@contextmanager
def temporary_folder(parent: Path | None, name: str) -> Iterator[Path]:
    """An empty folder in `parent` (None: where the system has its temporary files), for its owner
    alone; gone afterwards, unless it was renamed."""
    with held_file(parent or Path(tempfile.gettempdir()), name) as (held, _):
        folder = Path(f"{held}{CONTENT}")
        folder.mkdir(mode=0o700)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def held_file(folder: Path, name: str) -> Iterator[tuple[Path, BinaryIO]]:
    """A new temporary file for `name`, locked while the block lasts; gone afterwards, unless it was
    renamed."""
    make_folder(folder)
    remove_unfinished_once(folder.absolute())
    while True:
        descriptor, path = tempfile.mkstemp(dir=folder, prefix=f".{name}.", suffix=UNFINISHED)
        with os.fdopen(descriptor, "w+b") as file:
            if not hold(descriptor):
                continue
            try:
                yield Path(path), file
            finally:
                Path(path).unlink(missing_ok=True)
            return


def hold(descriptor: int) -> bool:
    """Lock a new file. False where another process has it, or had it and removed it: it took the
    file for a dead writer's before it was locked."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks: nobody removes anything there
        return True
    return os.fstat(descriptor).st_nlink > 0


def remove_unfinished(folder: Path) -> None:
    """Remove the temporary files and folders of writers that are dead: nobody holds their lock, on
    whatever machine."""
    for path in folder.glob(f".*{UNFINISHED}"):
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
        except OSError:  # just renamed, or another user's
            continue
        with os.fdopen(descriptor), suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(f"{path}{CONTENT}", ignore_errors=True)
            path.unlink(missing_ok=True)


remove_unfinished_once = functools.cache(remove_unfinished)
"""As `remove_unfinished`, once in the life of a process."""


def make_folder(folder: Path) -> None:
    """Make a folder and those above it, where they are missing."""
    if not folder.is_dir():
        make_folder(folder.parent)
        with suppress(FileExistsError):
            folder.mkdir()
            follow_folder(folder, stat.S_IMODE(folder.stat().st_mode))


def make_private_folder(folder: Path) -> None:
    """Make a folder for its owner alone, or for the group where setgid says that all in the folder
    above is. One that is there stays as it is."""
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.parent.stat().st_mode & stat.S_ISGID:
            follow_folder(folder, 0o700)


def make_private_file(path: Path) -> None:
    """As `make_private_folder`, an empty file: a database fills it."""
    make_folder(path.parent)
    with suppress(FileExistsError):
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        if path.parent.stat().st_mode & stat.S_ISGID:
            follow_folder(path, 0o600)


def follow_folder(path: Path, mode: int) -> None:
    """Give a new file or folder its mode: no more than the folder around it allows to others, and
    all of that, with its group, where a group shares the folder."""
    around = path.parent.stat()
    writers = around.st_mode & (stat.S_IWGRP | stat.S_IWOTH)  # what all may write is not a group's
    if around.st_mode & stat.S_ISGID or writers == stat.S_IWGRP:
        with suppress(PermissionError):  # not a member
            os.chown(path, -1, around.st_gid)
        mode = around.st_mode & (0o2775 if path.is_dir() else 0o664)
    else:
        mode &= around.st_mode
    path.chmod(mode | (0o700 if path.is_dir() else 0o600))


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
    write_text(path, text)


def write_text(path: Path, text: str) -> None:
    """Write `text`, whole or not at all."""
    replace_file(path, lambda file: file.write(text.encode()))


def read_json(path: Path) -> Any:
    """Read JSON; ArtifactError names the file when it is missing or damaged."""
    try:
        return json.loads(path.read_text())
    except FileNotFoundError as error:
        raise ArtifactError(f"{path} does not exist: run the stage that makes it first") from error
    except (ValueError, RecursionError) as error:
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
