"""Why a place takes no more writes, in words: a full disk, a used-up quota, a read-only file
system, a missing permission. And whether a folder takes them, asked before hours of work depend on
it."""

import errno
import os
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path

REASONS = {
    errno.ENOSPC: "the disk is full: free some of it",
    errno.EDQUOT: "the quota on this disk is used up: free some of it, or have it raised",
    errno.EFBIG: "the file would be larger than a process may write: raise the limit (ulimit -f)",
    errno.EROFS: "the file system is read-only: mount it for writing, or name another place",
    errno.EACCES: "permission denied: let this user write there, or name another place",
    errno.EPERM: "this is not permitted: let this user write there, or name another place",
    errno.ENOTDIR: "a part of this path is a file and no folder: move it away, or name another",
    errno.EIO: "the disk reports an error: check it, or name another place",
}
SQLITE = {8: errno.EROFS, 10: errno.EIO, 13: errno.ENOSPC}  # its READONLY, IOERR and FULL
IN_WORDS = re.compile(r"\(os error (\d+)\)")  # how polars, safetensors and tokenizers put it
PROBE_BYTES = 1 << 20


def reason(error: BaseException) -> str | None:
    """Why something could not be written, and what to do; None where the error is of another
    kind."""
    for one in chain(error):
        number = number_of(one)
        if number in REASONS:
            return REASONS[number]
    return None


def explain(error: BaseException, path: Path | None = None) -> str | None:
    """`reason`, as a sentence with how to go on, and with the file that the error names, or else
    `path`; None where the error is of another kind."""
    why = reason(error)
    if why is None:
        return None
    named = [one.filename for one in chain(error) if isinstance(one, OSError)]
    place = next((Path(name) for name in named if isinstance(name, str)), None)
    if path is not None and (place is None or place.parent == path.parent):
        place = path  # and not the name under which it is written
    return sentence(place or "a file", why)


def sentence(place: Path | str, why: str) -> str:
    """What is wrong with a place, and how to go on."""
    return f"{place}: {why}. What was finished is kept: then run the same command again"


def chain(error: BaseException) -> Iterator[BaseException]:
    """An error, the one that it wraps, and so on."""
    seen: set[int] = set()
    one: BaseException | None = error
    while one is not None and id(one) not in seen:
        seen.add(id(one))
        yield one
        one = getattr(one, "orig", None) or one.__cause__


def number_of(error: BaseException) -> int | None:
    """The operating system's number of an error, where it has one."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno
    if isinstance(code := getattr(error, "sqlite_errorcode", None), int):
        return SQLITE.get(code & 0xFF)
    found = IN_WORDS.search(str(error))
    return int(found[1]) if found else None


def try_writing(folder: Path) -> None:
    """Write a mebibyte into `folder`, or where it would be made, and delete it. Raises OSError."""
    folder = folder.expanduser().absolute()
    # lexists: a link to a disk that is not mounted is not to be passed over
    place = next(path for path in (folder, *folder.parents) if os.path.lexists(path))
    with tempfile.TemporaryFile(dir=place, buffering=0) as file:
        written = 0
        while written < PROBE_BYTES:
            written += file.write(b"\0" * (PROBE_BYTES - written))
        os.fsync(file.fileno())  # a remote file system may say only now that it is full
