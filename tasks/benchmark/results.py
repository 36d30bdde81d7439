"""The results file: a line of JSON for every finished cell, appended and never rewritten, so that
a table fills over several sittings and on several machines. Beside it stands what the families are
like (`.facts.json`)."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tasks.common.files import ArtifactError, read_json

Line = dict[str, Any]


def read_results(path: Path) -> dict[str, Line]:
    """The lines by the key of their cell; a cell that failed and ran again has its last line. A
    line cut off by a kill is left out."""
    found: dict[str, Line] = {}
    if not path.exists():
        return found
    lines = path.read_text().split("\n")
    for number, text in enumerate(lines, 1):
        if not text:
            continue
        try:
            line = json.loads(text)
            found[line["key"]] = line
        except (ValueError, KeyError) as error:
            if number == len(lines):  # it has no end: the kill came while it was written
                continue
            raise ArtifactError(f"{path}: line {number} is no result: {error}") from error
    return found


def facts_file(path: Path) -> Path:
    """Where the facts of a results file stand."""
    return path.with_suffix(".facts.json")


def read_facts(path: Path) -> dict[str, Any]:
    """What the families of a results file are like, by name; of those that were prepared."""
    file = facts_file(path)
    return dict(read_json(file)) if file.exists() else {}


def append_result(path: Path, line: Mapping[str, Any]) -> None:
    """Add a line, on the disk when this returns. What a kill left of the line before is ended, so
    that this one stands alone."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(line, sort_keys=True) + "\n"
    with path.open("a+b") as file:
        end = file.seek(0, os.SEEK_END)
        if end:
            file.seek(end - 1)
            if file.read(1) != b"\n":
                cut_unfinished(path)
        file.write(text.encode())
        file.flush()
        os.fsync(file.fileno())


def cut_unfinished(path: Path) -> None:
    """Drop what stands after the last end of a line."""
    content = path.read_bytes()
    with path.open("r+b") as file:
        file.truncate(content.rfind(b"\n") + 1)


def digits(counts: "list[int]") -> str:
    """Counts of up to 35 as one character each: what every prompt's correct samples are kept as."""
    return "".join("0123456789abcdefghijklmnopqrstuvwxyz"[count] for count in counts)


def counts_of(text: str) -> list[int]:
    """The inverse of `digits`."""
    return [int(character, 36) for character in text]
