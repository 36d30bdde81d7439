"""Lock files: one writer at a time."""

import fcntl
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from tasks.common.files import writing

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.1  # between two attempts to get a lock
REPORT_SECONDS = 60.0  # between two log lines about the wait


@contextmanager
def exclusive(path: Path, what: str) -> Iterator[None]:
    """Lock the file `path` for the block. A second process waits, and logs the holder's pid and how
    long it has waited for `what`. The kernel releases the lock of a killed process. Raise
    WriteError if the file cannot be written."""
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        opened = open_lock(path)
    with opened as file:
        wait_for_lock(file, what, path)
        file.truncate(0)
        with writing(path):  # unbuffered: on a full disk closing the file would fail again
            os.write(file.fileno(), f"{os.getpid()}\n".encode())
        try:
            yield
        finally:
            file.truncate(0)
            fcntl.flock(file, fcntl.LOCK_UN)


def note(path: Path, text: str) -> None:
    """Write a line of text below the pid in the lock file at `path`, which this process holds."""
    lines = f"{os.getpid()}\n{text}\n".encode()
    with path.open("r+b", buffering=0) as file:
        file.write(lines)  # at once, so that a reader finds a whole line
        file.truncate(len(lines))


def held(path: Path) -> list[str]:
    """Return the lines of a lock file, its holder's pid and note; none if no process holds it."""
    with suppress(FileNotFoundError), path.open() as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return file.read().splitlines()[:2]
    return []


def open_lock(path: Path) -> TextIO:
    """Open the lock file, or create it for every user of the machine."""
    flags = os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW
    try:
        return os.fdopen(os.open(path, flags), "a+")
    except FileNotFoundError:
        descriptor = os.open(path, flags | os.O_CREAT, 0o666)
        with suppress(PermissionError):  # another user has created it meanwhile
            os.fchmod(descriptor, 0o666)  # nosec B103  # it contains a pid; all users wait for it
        return os.fdopen(descriptor, "a+")


def wait_for_lock(file: TextIO, what: str, path: Path) -> None:
    """Wait until this process has the lock. Polling makes it possible to interrupt the wait and to
    log it."""
    began, next_report = time.monotonic(), 0.0
    while True:
        waited = time.monotonic() - began
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if waited >= next_report:
                file.seek(0)
                holder = file.readline().strip() or "unknown"
                still = f"; {waited:.0f} s so far" if next_report else ""
                logger.warning(
                    "waiting for %s: process %s holds it (%s)%s", what, holder, path, still
                )
                next_report = waited + REPORT_SECONDS
            time.sleep(POLL_SECONDS)
        else:
            if next_report:
                logger.warning("got %s after %.0f s", what, waited)
            return
