"""How processes exit: together with their parent, and after an interrupt with the right status.

A killed `dvc` or flow must not leave a trainer behind that writes alongside a new one. A stage's
`__main__` calls `begin_stage` before any other import, because imports take seconds and a kill or
Ctrl-C in that time must take effect as well. So this module imports very little."""

import ctypes
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

PR_SET_PDEATHSIG = 1
INTERRUPTED = 130
PARENT = "WINNOW_PARENT"  # the process that a stage must not outlive: a flow's dvc or fork server
RWLOCK = os.path.join(".dvc", "tmp", "rwlock")


def die_with_parent() -> None:
    """Let the kernel kill this process when its parent ends (Linux; a no-op elsewhere). If the
    `dvc` that started it has ended already, exit now."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if "DVC_STAGE" in os.environ and is_orphan():
        os._exit(INTERRUPTED)


def begin_stage() -> None:
    """Make this process die with its parent. Until `interrupt_on_terminate` is called, also make it
    exit at once on Ctrl-C, since it has nothing to save yet."""
    die_with_parent()
    signal.signal(signal.SIGINT, exit_interrupted)


def exit_interrupted(number: int, frame: object) -> None:
    """Handle a signal: exit at once with the status of an interrupt."""
    os._exit(INTERRUPTED)


@contextmanager
def interrupts_blocked() -> Iterator[None]:
    """Block Ctrl-C in this thread, and in processes started here until they unblock it. Otherwise,
    a Ctrl-C before they set their handlers would print a traceback."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _interrupt(number: int, frame: object) -> None:
    raise KeyboardInterrupt(signal.Signals(number).name)


def interrupt_on_terminate() -> None:
    """Let SIGINT and SIGTERM raise KeyboardInterrupt, even if SIGINT was ignored, as in commands
    that a shell script starts in the background."""
    signal.signal(signal.SIGTERM, _interrupt)
    signal.signal(signal.SIGINT, signal.default_int_handler)


def interrupted(status: int = INTERRUPTED) -> int:
    """Return `status`, the exit status of a command that caught an interrupt.

    CPython records an interrupt that passed through code compiled from a string (for example while
    a dataclass is created at import), and later kills the process with SIGINT, whatever status it
    returns. Running code from a string once more clears the record."""
    exec("")  # nosec B102
    return status


def is_orphan() -> bool:
    """Return whether the `dvc` that ran this command has ended, so that it is no longer an ancestor
    of this process.

    A flow's dvc passes its pid in WINNOW_PARENT. A plain `dvc repro` writes its pid into DVC's lock
    file while a stage runs."""
    given = os.environ.get(PARENT)
    wanted = {int(given)} if given else lock_holders()
    return bool(wanted) and wanted.isdisjoint(ancestors())


def ancestors() -> set[int]:
    """Return the pids of this process's parent, its parent, and so on, as far as visible."""
    found, pid = set(), os.getppid()
    while pid:
        found.add(pid)
        try:
            with open(f"/proc/{pid}/stat") as file:
                pid = int(file.read().rpartition(")")[2].split()[1])
        except OSError:  # ended just now, or another user's
            break
    return found


def lock_holders() -> set[int]:
    """Return the pids in the lock file of the DVC repository around the working folder; empty if
    there is no such file, or if it is being written."""
    import json

    folder = os.getcwd()
    while not os.path.isdir(os.path.join(folder, ".dvc")):
        folder, inner = os.path.dirname(folder), folder
        if folder == inner:
            return set()
    try:
        with open(os.path.join(folder, RWLOCK)) as file:
            held = json.load(file)
        readers = [holder for holders in held.get("read", {}).values() for holder in holders]
        return {int(holder["pid"]) for holder in [*readers, *held.get("write", {}).values()]}
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return set()
