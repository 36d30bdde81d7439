"""dvc.lock: the entries of all stages, the reason why a file cannot be read, and the repair of a
file that a killed dvc left incomplete."""

import logging
import os
import re
from pathlib import Path
from typing import Any

from tasks.common import params
from tasks.common.files import ArtifactError, write_text

logger = logging.getLogger(__name__)

CONFLICT = re.compile(r"^(<{7}|={7}|>{7})( |$)", re.MULTILINE)
REFUSED = re.compile(r"'(?:\./)?(\S*dvc\.lock)' (?:is invalid|validation failed)")


class LockError(ArtifactError):
    """Raised if a dvc.lock cannot be read; the message contains the command that repairs it."""


def read(path: Path) -> dict[str, Any]:
    """Return the stages of a dvc.lock, empty if it is missing. Raise LockError if it is invalid."""
    if not path.exists():
        return {}
    try:
        stages = params.load(path)["stages"] or {}
        if isinstance(stages, dict):
            return stages
        why = "its stages are not a mapping"
    except KeyError:
        why = "it has no stages"
    except OSError as error:
        why = str(error.strerror)
    except params.ParamsError as error:
        has_markers = CONFLICT.search(path.read_text(errors="replace"))
        why = "it has the conflict markers of a merge" if has_markers else str(error)
    raise LockError(unreadable(os.path.relpath(path), why))


def unreadable(name: str, why: str) -> str:
    return (
        f"{name} cannot be read ({why}): restore the committed one with `git checkout HEAD -- "
        f"{name}`, and run again; outputs in DVC's cache are restored, not recomputed"
    )


def refused(said: str) -> list[str]:
    """Return messages about lock files that DVC rejects in its output; `read` may accept them."""
    return [unreadable(name, "see DVC's output above") for name in REFUSED.findall(said)]


def broken(root: Path) -> list[str]:
    """Return messages about the unreadable dvc.lock files of a project's data roots."""
    found = []
    for pattern in ("dvc.lock", "*/dvc.lock"):
        for path in sorted(root.glob(pattern)):
            try:
                read(path)
            except LockError as error:
                found.append(str(error))
    return found


def keep(path: Path, copy: Path) -> None:
    """Copy a dvc.lock before a stage runs and after it: DVC writes the file in place, so a kill can
    leave a part of it, which may be valid."""
    if path.exists():
        write_text(copy, path.read_text())


def restore(path: Path, copy: Path) -> None:
    """Restore a dvc.lock from its copy if it has only the copy's first entries, in their order, or
    cannot be read. Then delete the copy, which only an interrupted or killed run leaves."""
    kept = names(copy)
    now = names(path) if kept else []  # reading a long one takes seconds
    is_cut = path.exists() and len(now) < len(kept) and now == kept[: len(now)]
    if is_cut and not CONFLICT.search(path.read_text(errors="replace")):
        write_text(path, copy.read_text())
        logger.warning("%s was incomplete after a kill: its last whole copy is restored", path.name)
    copy.unlink(missing_ok=True)


def names(path: Path) -> list[str]:
    """Return the names of the stages in a dvc.lock, none if it is missing or cannot be read."""
    try:
        return list(read(path))
    except LockError:
        return []
