"""dvc.lock: what it says of every stage, and its entries as text, which one machine writes and
another takes over as they are."""

import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tasks.common import params
from tasks.common.files import ArtifactError, write_text

HEAD = "schema: '2.0'\nstages:\n"
CONFLICT = re.compile(r"^(<{7}|={7}|>{7})( |$)", re.MULTILINE)
REFUSED = re.compile(r"'(?:\./)?(\S*dvc\.lock)' (?:is invalid|validation failed)")
ENTRY = re.compile(r"^  (?P<stage>[^\s:]+):\n(?:   .*\n|\n)*", re.MULTILINE)


class LockError(ArtifactError):
    """A dvc.lock cannot be read; the message names the command that puts it right."""


def read(path: Path) -> dict[str, Any]:
    """Its stages; none when nothing has ever run. Raises LockError."""
    if not path.exists():
        return {}
    try:
        stages = params.load(path)["stages"] or {}
        if isinstance(stages, dict):
            return stages
        why = "its stages are no mapping"
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
        f"{name} cannot be read ({why}): take the committed one by `git checkout HEAD -- {name}`, "
        "and run again; what DVC has in its cache is restored and not computed"
    )


def refused(said: str) -> list[str]:
    """What is wrong with the locks that DVC has refused in these words: it checks more."""
    return [unreadable(name, "DVC's words are above") for name in REFUSED.findall(said)]


def broken(root: Path) -> list[str]:
    """What is wrong with the locks of a project's data roots."""
    found = []
    for pattern in ("dvc.lock", "*/dvc.lock", "*/rounds/*/dvc.lock"):
        for path in sorted(root.glob(pattern)):
            try:
                read(path)
            except LockError as error:
                found.append(str(error))
    return found


def entries(text: str) -> dict[str, str]:
    """Every stage's lines."""
    return {match["stage"]: match[0] for match in ENTRY.finditer(text)}


def chosen(text: str, stages: Iterable[str]) -> str:
    """A dvc.lock of these stages alone, as far as they are in `text`."""
    wanted = set(stages)
    return HEAD + "".join(entry for stage, entry in entries(text).items() if stage in wanted)


def with_entry(text: str, stage: str, entry: str) -> str:
    """`text` with the entry of a stage, in its place, or at the end where it is new."""
    before = entries(text).get(stage)
    return text.replace(before, entry, 1) if before else (text or HEAD) + entry


def write(path: Path, text: str) -> None:
    """The file, never half of it."""
    write_text(path, text)
