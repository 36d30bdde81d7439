"""Atomic writes of files, and digests of their contents.

Writes go to a temporary name, are flushed to the disk and then renamed: a reader sees the old file
or the new one, never a partial file. A temporary file is locked while its writer lives. The next
process that writes into the folder removes the temporary files of killed writers.

New files and folders follow their parent folder: if a group shares it (group-writable or setgid),
they belong to that group; if it is private, they are private."""

import errno
import fcntl
import functools
import hashlib
import json
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from tasks.common.redaction import without_secrets

UNFINISHED = ".unfinished"  # the end of a temporary file's name
CONTENT = ".d"  # suffix of the folder of a temporary file
REASONS = {
    errno.ENOSPC: "the disk is full: free some of it",
    errno.EDQUOT: "the quota on this disk is used up: free some of it, or get it raised",
    errno.EFBIG: "the file would be larger than a process may write: raise the limit (ulimit -f)",
    errno.EROFS: "the file system is read-only: mount it for writing, or use another place",
    errno.EACCES: "permission denied: give this user write access, or use another place",
    errno.EPERM: "this is not permitted: give this user write access, or use another place",
    errno.ENOTDIR: "a part of this path is a file, not a folder: move it away, or use another path",
    errno.EIO: "the disk reports an error: check it, or use another place",
}
SQLITE = {8: errno.EROFS, 10: errno.EIO, 13: errno.ENOSPC}  # its READONLY, IOERR and FULL
IN_WORDS = re.compile(r"\(os error (\d+)\)")  # in polars, safetensors and tokenizers
PROBE_BYTES = 1 << 20


class ArtifactError(ValueError):
    """Raised if a file of the pipeline is missing or invalid. Addresses lose their secrets."""

    def __str__(self) -> str:
        return without_secrets(super().__str__())


class WriteError(ArtifactError, OSError):
    """Raised if a place cannot be written; the message contains the reason and the remedy."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn an exception in the block, from any library, into a WriteError about `path` if its cause
    is a full disk, a read-only file system or the like."""
    try:
        yield
    except WriteError:
        raise
    except Exception as error:
        message = explain_write(error, path)
        if message is None:
            raise
        raise WriteError(message) from error


def require_writable(folder: Path) -> None:
    """Raise WriteError unless a mebibyte fits in `folder`, or in its nearest existing parent."""
    absolute = folder.expanduser().absolute()
    # lexists: a link to a disk that is not mounted must not be skipped
    place = next(path for path in (absolute, *absolute.parents) if os.path.lexists(path))
    try:
        with tempfile.TemporaryFile(dir=place, buffering=0) as file:
            written = 0
            while written < PROBE_BYTES:
                written += file.write(b"\0" * (PROBE_BYTES - written))
            os.fsync(file.fileno())  # a remote file system may report here that it is full
    except OSError as error:
        why = write_reason(error) or f"{error.strerror}: create it, or use another place"
        raise WriteError(write_sentence(folder, why)) from error


# ------------------------------------------------------------------------------ why a write fails


def write_reason(error: BaseException) -> str | None:
    """Return why a write failed and the remedy: a full disk, a used-up quota, a missing permission,
    and so on. Return None for an error whose number is not in REASONS."""
    for one in causes(error):
        number = number_of(one)
        if number in REASONS:
            return REASONS[number]
    return None


def explain_write(error: BaseException, path: Path | None = None) -> str | None:
    """Return `write_reason` as a sentence about `path`, or None if there is no reason. If `path` is
    None, or the error names a file in another folder, the sentence is about the error's file."""
    why = write_reason(error)
    if why is None:
        return None
    named = [one.filename for one in causes(error) if isinstance(one, OSError)]
    place = next((Path(name) for name in named if isinstance(name, str)), None)
    if path is not None and (place is None or place.parent == path.parent):
        place = path  # not its temporary name
    return write_sentence(place or "a file", why)


def write_sentence(place: Path | str, why: str) -> str:
    """Return the message for a failed write to `place`: the reason, and how to resume."""
    return f"{place}: {why}. Finished results are kept: then run the same command again"


def causes(error: BaseException) -> Iterator[BaseException]:
    """Yield an error, the error that it wraps, and so on."""
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        yield one
        one = getattr(one, "orig", None) or one.__cause__


def number_of(error: BaseException) -> int | None:
    """Return the errno of an error from the operating system, SQLite or a library, or None."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    if isinstance(code := getattr(error, "sqlite_errorcode", None), int):
        return SQLITE.get(code & 0xFF)
    found = IN_WORDS.search(str(error))
    return int(found[1]) if found else None


# ------------------------------------------------------------------------------ whole or not at all


def replace_file(path: Path, write: Callable[[BinaryIO], Any]) -> None:
    """Call `write` on a temporary file beside `path`, flush it to the disk, and rename it to
    `path`."""
    with temporary_file(path, write) as temporary:
        os.replace(temporary, path)
    sync_folder(path.parent)


def create_file(path: Path, write: Callable[[BinaryIO], Any]) -> bool:
    """Write as `replace_file` does and return True, or return False if `path` exists. Only one of
    several concurrent writers succeeds. Raise ArtifactError if hard links are not supported."""
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
    """Yield the path of a temporary file beside `path`, written by `write` and flushed. It is
    removed afterwards, unless it was renamed."""
    with writing(path), held_file(path.parent, path.name) as (temporary, file):
        follow_folder(temporary, 0o644)  # `write` may set another mode
        write(file)
        file.flush()
        os.fsync(file.fileno())
        yield temporary


@contextmanager
def temporary_folder(parent: Path | None, name: str) -> Iterator[Path]:
    """Yield an empty folder in `parent` (None: the system's temporary folder), private to its
    owner. It is removed afterwards, unless it was renamed."""
    with held_file(parent or Path(tempfile.gettempdir()), name) as (held, _):
        folder = Path(f"{held}{CONTENT}")
        folder.mkdir(mode=0o700)
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def whole_folder(folder: Path) -> Iterator[Path]:
    """Yield a temporary folder that replaces `folder` if the block succeeds. Until then the old
    folder stays."""
    with temporary_folder(folder.parent, folder.name) as scratch:
        new = scratch / "new"
        old = scratch / "old"
        new.mkdir()
        yield new
        # flush the files to disk before the rename
        for path in filter(Path.is_file, new.rglob("*")):
            path.chmod(0o644)
            with path.open("rb") as file:
                os.fsync(file.fileno())
        if folder.exists():
            os.rename(folder, old)
        os.rename(new, folder)
        follow_folder(folder, 0o755)
    sync_folder(folder.parent)


@contextmanager
def held_file(folder: Path, name: str) -> Iterator[tuple[Path, BinaryIO]]:
    """Yield (path, file) of a new temporary file for `name`, locked during the block. It is removed
    afterwards, unless it was renamed."""
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
    """Lock a new file. Return False if another process, taking it for a dead writer's, has already
    locked or removed it. On a file system without locks, return True without locking it."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # without locks, no process removes anything
        return True
    return os.fstat(descriptor).st_nlink > 0


def remove_unfinished(folder: Path) -> None:
    """Remove the temporary files and folders of dead writers: those that no process on any machine
    has locked."""
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
"""Call `remove_unfinished` once per process."""


def make_folder(folder: Path) -> None:
    """Create a folder and its missing parents."""
    if not folder.is_dir():
        make_folder(folder.parent)
        with suppress(FileExistsError):
            folder.mkdir()
            follow_folder(folder, stat.S_IMODE(folder.stat().st_mode))


def make_private_folder(folder: Path) -> None:
    """Create a folder that is private to its owner, or to the group if the parent has setgid. An
    existing folder is unchanged."""
    if not folder.is_dir():
        make_folder(folder.parent)
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.parent.stat().st_mode & stat.S_ISGID:
            follow_folder(folder, 0o700)


def make_private_file(path: Path) -> None:
    """Create an empty file, unless it exists, with the privacy of `make_private_folder`."""
    make_folder(path.parent)
    with suppress(FileExistsError):
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        if path.parent.stat().st_mode & stat.S_ISGID:
            follow_folder(path, 0o600)


def follow_folder(path: Path, mode: int) -> None:
    """Set the mode of a new file or folder to `mode` without permissions that the parent lacks. If
    a group shares the parent, set the parent's own group and permissions instead."""
    around = path.parent.stat()
    writers = around.st_mode & (stat.S_IWGRP | stat.S_IWOTH)  # world-writable: not one group's
    if around.st_mode & stat.S_ISGID or writers == stat.S_IWGRP:
        with suppress(PermissionError):  # this user is not in the group
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
    """Write `value` atomically as sorted, indented JSON."""
    text = json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n"
    write_text(path, text)


def rounded(value: Any) -> Any:
    """Return a JSON-like value with every float rounded to six significant digits: CPU models sum
    in different orders, and equal results must be equal files on all of them."""
    if isinstance(value, Mapping):
        return {key: rounded(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [rounded(inner) for inner in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def write_text(path: Path, text: str) -> None:
    """Write `text` atomically."""
    replace_file(path, lambda file: file.write(text.encode()))


def read_json(path: Path) -> Any:
    """Read JSON. Raise ArtifactError with the name of the file if it is missing or damaged."""
    try:
        return json.loads(path.read_text())
    except FileNotFoundError as error:
        raise ArtifactError(f"{path} does not exist: create it with `winnow run`") from error
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"{path} is not JSON: {error}") from error


def digest(value: Any) -> str:
    """Return the 16-digit hex digest of a JSON-like value: equal values have equal digests."""
    return hashlib.sha256(
        json.dumps(value, sort_keys=True, ensure_ascii=False).encode()
    ).hexdigest()[:16]


def digest_file(path: Path) -> str:
    """Return the 16-digit hex digest of a file's content. Raise ArtifactError if it is missing."""
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()[:16]
    except FileNotFoundError as error:
        raise ArtifactError(f"{path} does not exist: create it with `winnow run`") from error


def digest_folder(folder: Path, patterns: Iterable[str] = ("**/*",)) -> str:
    """Return the 16-digit hex digest of the names and contents of the files in `folder` that match
    one of `patterns`."""
    files = sorted(
        {path for pattern in patterns for path in folder.glob(pattern) if path.is_file()}
    )
    return digest([[path.relative_to(folder).as_posix(), digest_file(path)] for path in files])
