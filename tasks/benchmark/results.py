"""The results file: a line of JSON for every finished cell, so that a table fills over several
sittings and on several machines. Lines are appended. None is deleted or changed afterwards; the
field `superseded`, the reason why a line no longer counts, is all that is ever added to one. Beside
the file stands what the families are like (`.facts.json`)."""

import json
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from tasks.common.files import ArtifactError, read_json, replace_file

Line = dict[str, Any]


def read_lines(path: Path) -> list[Line]:
    """Every line of the file, superseded ones among them. A line cut off by a kill is left out.
    Raises ArtifactError for one that is no result."""
    found: list[Line] = []
    if not path.exists():
        return found
    lines = path.read_text().split("\n")
    for number, text in enumerate(lines, 1):
        if not text:
            continue
        try:
            line = json.loads(text)
            line["key"]
            found.append(line)
        except (ValueError, KeyError, TypeError) as error:
            if number == len(lines):  # it has no end: the kill came while it was written
                continue
            raise ArtifactError(f"{path}: line {number} is no result: {error}") from error
    return found


def current(lines: Collection[Line]) -> dict[str, Line]:
    """The lines that count, by the key of their cell; a cell that failed and ran again has its last
    line."""
    return {line["key"]: line for line in lines if "superseded" not in line}


def read_results(path: Path) -> dict[str, Line]:
    """The lines of a file that count, by the key of their cell."""
    return current(read_lines(path))


def supersede(path: Path, keys: Collection[str], reason: str) -> int:
    """Mark the lines of these keys that count as superseded; how many there were. The other lines
    keep their bytes."""
    content = path.read_bytes()
    texts, num = content.split(b"\n"), 0
    for place, text in enumerate(texts[:-1]):
        line = json.loads(text) if text else {"superseded": "an empty line"}
        if "superseded" not in line and line["key"] in keys:
            texts[place] = json.dumps({**line, "superseded": reason}, sort_keys=True).encode()
            num += 1
    replace_file(path, lambda stream: stream.write(b"\n".join(texts)))
    return num


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
