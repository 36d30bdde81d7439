"""The entries of dvc.lock as text, a stage each: what one machine writes, another takes over as it
is, and every other entry stays as DVC wrote it."""

import re
from collections.abc import Iterable
from pathlib import Path

from tasks.common.files import write_text

HEAD = "schema: '2.0'\nstages:\n"
ENTRY = re.compile(r"^  (?P<stage>[^\s:]+):\n(?:   .*\n|\n)*", re.MULTILINE)


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
