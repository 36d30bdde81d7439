"""Processes that end when they should: death with the parent, one writer at a time, an honest exit
status."""

import ctypes
import fcntl
import logging
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

logger = logging.getLogger(__name__)

PR_SET_PDEATHSIG = 1
INTERRUPTED = 130


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends (Linux; elsewhere nothing happens).

    A killed `dvc` or flow must not leave a trainer behind that goes on writing beside its
    successor."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if (
        "DVC_STAGE" in os.environ and "RANK" not in os.environ and is_orphan()
    ):  # torchrun looks after its ranks
        os._exit(INTERRUPTED)


def is_orphan() -> bool:
    """Whether the `dvc` that ran this command is gone already: imports take seconds, and a kill in
    that time comes before anybody asked to die with it. What adopts orphans is of another session
    than dvc and its children."""
    try:
        return os.getsid(os.getppid()) != os.getsid(0)
    except (ProcessLookupError, PermissionError):
        return True


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt(signal.Signals(number).name)


def interrupt_on_terminate() -> None:
    """Make SIGTERM end a stage the way Ctrl-C does."""
    signal.signal(signal.SIGTERM, _interrupt)


@contextmanager
def exclusive(path: Path, what: str) -> Iterator[None]:
    """Hold the lock file `path`; a second process waits here and says for which pid. The kernel
    frees it at death."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            logger.warning(
                "waiting for %s: process %s holds it (%s)",
                what,
                file.read().strip() or "unknown",
                path,
            )
            fcntl.flock(file, fcntl.LOCK_EX)
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
        try:
            yield
        finally:
            file.truncate(0)
            fcntl.flock(file, fcntl.LOCK_UN)
