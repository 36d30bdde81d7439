"""Death with the parent: a killed `dvc` or flow must not leave a trainer behind that goes on
writing beside its successor.

A stage's `__main__` asks for it before it imports anything else, because imports take seconds and a
kill in that time must count as well. So this imports next to nothing."""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1
INTERRUPTED = 130
PARENT = "WINNOW_PARENT"  # the process that a stage must not outlive: the flow's dvc, or its forks
RWLOCK = os.path.join(".dvc", "tmp", "rwlock")


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends (Linux; elsewhere nothing happens).
    Under a `dvc` that is gone already, end now."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if "DVC_STAGE" in os.environ and is_orphan():
        os._exit(INTERRUPTED)


def is_orphan() -> bool:
    """Whether the `dvc` that ran this command is gone: it is no ancestor of this process any more.

    A flow's dvc gives its pid. A plain `dvc repro` notes its pid in DVC's own lock file for as long
    as a stage runs. Where neither is known, an orphan shows by its session, which is another than
    that of the process that adopted it (not in a container, whose first process may share it)."""
    given = os.environ.get(PARENT)
    wanted = {int(given)} if given else lock_holders()
    if wanted:
        return wanted.isdisjoint(ancestors())
    if "RANK" in os.environ:  # torchrun, which looks after its ranks, gives each a session
        return False
    try:
        return os.getsid(os.getppid()) != os.getsid(0)
    except (ProcessLookupError, PermissionError):
        return True


def ancestors() -> set[int]:
    """The pids of this process's parent, its parent, and so on, as far as they can be seen."""
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
    """The pids in the lock file of the DVC repository around the working folder; none where there
    is no such file, or where it is being written."""
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
