"""DVC's notes of who reads and writes which file (`.dvc/tmp/rwlock`), without those of the dead.

DVC itself forgets a holder whose pid is gone. One that is a zombie, or whose pid another process
has by now, as after the restart of a container, would block its files for ever. So a holder is also
dead where the process of its pid runs another command. Notes are taken out under the lock that DVC
takes to write them. Left out: systems without /proc, and DVC's `core.hardlink_lock`."""

import fcntl
import json
import logging
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tasks.common.files import replace_file

logger = logging.getLogger(__name__)

DVC = Path(".dvc")
NOTES = DVC / "tmp" / "rwlock"
Notes = dict[str, dict[str, Any]]
BUSY = re.compile(r"'(/[^'\n]+)' is busy, it is being blocked by:")
BLOCKING = re.compile(r"^ +\(PID (\d+)\): ", re.MULTILINE)
POLL_SECONDS = 0.5


def forget_dead() -> None:
    """Take out the notes of holders that are dead, and of this process, which is between two
    commands. The working folder is the repository."""
    if not NOTES.exists() or not Path("/proc/self").exists():
        return
    if without_dead(read()) is None or has_other_locks():
        return
    with locked():
        living = without_dead(read())  # others may have written meanwhile
        if living is not None:
            replace_file(NOTES, lambda file: file.write(json.dumps(living).encode()))
            logger.warning("%s held files for processes that are gone: they are free again", NOTES)


def wait(said: str, is_ended: Callable[[], bool]) -> bool:
    """Wait until no living dvc that `said`, dvc's message, names as blocking a file holds it, or
    one above or below it, or until `is_ended`. False where the message names none."""
    blocking = {int(pid) for pid in BLOCKING.findall(said)}
    paths = [Path(path) for path in BUSY.findall(said)]
    if not blocking or not paths:
        return False
    names = ", ".join(str(pid) for pid in sorted(blocking))
    logger.warning("another dvc (process %s) is at work on these files: waiting for it", names)
    while not is_ended() and any(map(exists, blocking & pids_at(paths))):
        time.sleep(POLL_SECONDS)
        forget_dead()
    return True


def pids_at(paths: Iterable[Path]) -> set[int]:
    """Who holds one of the paths, or one above or below it."""
    notes = read() or {}
    held = [(Path(path), found) for path, found in notes.get("read", {}).items()]
    held += [(Path(path), [holder]) for path, holder in notes.get("write", {}).items()]
    return {
        holder["pid"]
        for path, found in held
        for other in paths
        if path.is_relative_to(other) or other.is_relative_to(path)
        for holder in found
    }


def read() -> Notes | None:
    """The notes, or None where a writer was killed among them, or is writing."""
    try:
        notes = json.loads(NOTES.read_text())
        return notes if isinstance(notes, dict) else None
    except FileNotFoundError:
        return {}
    except ValueError:
        return None


def without_dead(notes: Notes | None) -> Notes | None:
    """The notes of the living, or None where there are no others. None of a damaged file can be
    read, and no dvc goes on with it."""
    if notes is None:
        return {}
    dead = [holder for holder in holders(notes) if is_dead(holder["pid"], holder["cmd"])]
    if not dead:
        return None
    logger.debug("dead holders in %s: %s", NOTES, dead)
    readers = {
        path: [holder for holder in found if holder not in dead]
        for path, found in notes.get("read", {}).items()
    }
    writers = {
        path: holder for path, holder in notes.get("write", {}).items() if holder not in dead
    }
    return {"read": {path: found for path, found in readers.items() if found}, "write": writers}


def holders(notes: Notes) -> Iterator[dict[str, Any]]:
    """Every holder, as often as it is noted."""
    for found in notes.get("read", {}).values():
        yield from found
    yield from notes.get("write", {}).values()


def is_dead(pid: int, command: str) -> bool:
    """Whether the process that noted its pid and its command line is gone, as far as can be seen.

    Python hides a module's name (`-m dvc`), and a flow's dvc runs many commands: so the last word
    must be the same, or the process be a flow's dvc in this repository."""
    if pid == os.getpid():
        return True
    process = Path(f"/proc/{pid}")
    try:
        state = (process / "stat").read_text().rpartition(")")[2].split()[0]
        arguments = (process / "cmdline").read_text(errors="replace").split("\0")
        if state in ("Z", "X"):
            return True
        if {"flows.launch", "dvc"} <= set(arguments):
            return not os.path.samefile(process / "cwd", ".")
    except (FileNotFoundError, ProcessLookupError):
        return not exists(pid)
    except PermissionError:
        return False
    return " ".join(arguments).split()[-1:] != command.split()[-1:]


def exists(pid: int) -> bool:
    """Whether a process has this pid, although it may be hidden."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def has_other_locks() -> bool:
    """Whether DVC is told to lock by hard links, which is not done here."""
    files = (DVC / "config", DVC / "config.local")
    return any(file.exists() and "hardlink_lock" in file.read_text() for file in files)


@contextmanager
def locked() -> Iterator[None]:
    """DVC's lock of the notes."""
    with NOTES.with_name(f"{NOTES.name}.lock").open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
