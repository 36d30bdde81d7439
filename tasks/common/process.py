"""Processes that end when they should: one writer at a time, an honest exit status. Death with the
parent is in `parent`."""

import fcntl
import logging
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from tasks.common.files import writing
from tasks.common.parent import INTERRUPTED as INTERRUPTED

logger = logging.getLogger(__name__)

POLL_SECONDS = 0.1  # between two looks at a lock that another process holds
WORD_SECONDS = 60.0  # between two lines that say so


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt(signal.Signals(number).name)


def interrupt_on_terminate() -> None:
    """Make SIGTERM end a stage the way Ctrl-C does. SIGINT does so too where it was ignored, as in
    what a shell script starts in the background."""
    signal.signal(signal.SIGTERM, _interrupt)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def interrupted(status: int = INTERRUPTED) -> int:
    """The exit status of a command that caught an interrupt.

    CPython remembers an interrupt that passed through code compiled from a string, as dataclasses
    do in many an import, and later ends the process by SIGINT whatever status it returns. Running
    such code once more clears that."""
    exec("")  # nosec B102
    return status


@contextmanager
def exclusive(path: Path, what: str) -> Iterator[None]:
    """Hold the lock file `path`; a second process waits here, and says for which pid and how long.
    The kernel frees it at death. Raises WriteError where the file cannot be made."""
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        opened = open_lock(path)
    with opened as file:
        wait_for_lock(file, what, path)
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        try:
            yield
        finally:
            file.truncate(0)
            fcntl.flock(file, fcntl.LOCK_UN)


def open_lock(path: Path) -> TextIO:
    """The lock file, made where it is not there yet, for every user of the machine."""
    flags = os.O_RDWR | os.O_APPEND | os.O_NOFOLLOW
    try:
        return os.fdopen(os.open(path, flags), "a+")
    except FileNotFoundError:
        descriptor = os.open(path, flags | os.O_CREAT, 0o666)
        with suppress(PermissionError):  # another user's, made meanwhile
            os.fchmod(descriptor, 0o666)  # nosec B103  # it holds a pid, and all users wait for it
        return os.fdopen(descriptor, "a+")


def wait_for_lock(file: TextIO, what: str, path: Path) -> None:
    """Return when the lock is ours. Looking up now and then lets an interrupt through, and a word
    about the time."""
    began, next_word = time.monotonic(), 0.0
    while True:
        waited = time.monotonic() - began
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if waited >= next_word:
                file.seek(0)
                holder = file.read().strip() or "unknown"
                still = f"; {waited:.0f} s so far" if next_word else ""
                logger.warning(
                    "waiting for %s: process %s holds it (%s)%s", what, holder, path, still
                )
                next_word = waited + WORD_SECONDS
            time.sleep(POLL_SECONDS)
        else:
            if next_word:
                logger.warning("got %s after %.0f s", what, waited)
            return
