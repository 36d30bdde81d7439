"""The journal of executed work: what every step cost, so that what a kill throws away is counted.

A line a step, with its digest."""

import json
import logging
import math
from collections.abc import Mapping
from pathlib import Path

from tasks.common.files import digest, write_text

logger = logging.getLogger(__name__)

LOST = ("seconds", "flops", "tokens")
LOST_STEP = -1.0  # the journal's entry for what earlier kills lost


def read_journal(path: Path) -> list[dict[str, float]]:
    """The entries of a journal. A line cut short by a kill, or damaged, is left out: it only counts
    costs."""
    entries = []
    for line in path.read_text(errors="replace").splitlines() if path.exists() else []:
        try:
            entry = json.loads(line)
            values = {name: entry[name] for name in ("step", *LOST)}
            if digest(values) != entry["digest"]:
                raise ValueError("the line is not what was written")
            entries.append(values)
        except (ValueError, KeyError, TypeError):
            logger.warning("passing over a damaged line of %s: its work is not counted", path)
    return [
        {**entry, "step": math.inf if entry["step"] == LOST_STEP else entry["step"]}
        for entry in entries
    ]


def write_journal(path: Path, entries: list[dict[str, float]]) -> None:
    """The inverse of `read_journal`."""
    lines = [
        {**entry, "step": LOST_STEP if entry["step"] == math.inf else entry["step"]}
        for entry in entries
    ]
    text = "".join(map(journal_line, lines))
    write_text(path, text)


def journal_line(entry: Mapping[str, float]) -> str:
    """An entry as a line, with its digest."""
    values = {name: float(entry[name]) for name in ("step", *LOST)}
    return json.dumps({**values, "digest": digest(values)}) + "\n"
