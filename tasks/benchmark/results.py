"""The results file: one line of JSON for every finished cell, so that a table can be completed over
several sessions and machines. Lines are appended, and never deleted. The only later
change is the field `superseded`, the reason why a line no longer counts. The facts of the families
are in a file beside it (`.facts.json`)."""

import json
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from tasks.common.files import ArtifactError, read_json, replace_file

Line = dict[str, Any]
DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
MAX_COUNT = len(DIGITS) - 1


def read_lines(path: Path) -> list[Line]:
    """Return every line of the file, including superseded ones; none if there is no file. A line
    cut off by a kill is skipped. Raise ArtifactError for a line that is not a result."""
    found: list[Line] = []
    if not path.exists():
        return found
    lines = path.read_bytes().split(b"\n")
    for number, text in enumerate(lines, 1):
        if not text:
            continue
        try:
            line = json.loads(text)
            line["key"]
            found.append(line)
        except (ValueError, KeyError, TypeError) as error:
            if number == len(lines):  # no line end: a kill interrupted the write
                continue
            raise ArtifactError(f"{path}: line {number} is not a result: {error}") from error
    return found


def current(lines: Collection[Line]) -> dict[str, Line]:
    """Return, by the key of its cell, every line that is not superseded; the last one if a cell has
    several."""
    return {line["key"]: line for line in lines if "superseded" not in line}


def read_results(path: Path) -> dict[str, Line]:
    """Return the valid lines of a file by the key of their cell."""
    return current(read_lines(path))


def supersede(path: Path, keys: Collection[str], reason: str) -> int:
    """Mark the valid lines of these keys as superseded for `reason`; return their number. All other
    lines stay byte-identical."""
    texts, num = path.read_bytes().split(b"\n"), 0
    for place, text in enumerate(texts if is_whole(texts[-1]) else texts[:-1]):
        line = json.loads(text) if text else {"superseded": "an empty line"}
        if "superseded" not in line and line["key"] in keys:
            texts[place] = json.dumps({**line, "superseded": reason}, sort_keys=True).encode()
            num += 1
    replace_file(path, lambda stream: stream.write(b"\n".join(texts)))
    return num


def facts_file(path: Path) -> Path:
    return path.with_suffix(".facts.json")


def read_facts(path: Path) -> dict[str, Any]:
    """Return the facts of a results file by family, for the families that were prepared."""
    file = facts_file(path)
    return dict(read_json(file)) if file.exists() else {}


def append_result(path: Path, line: Mapping[str, Any]) -> None:
    """Append a line and sync it to disk. First remove a partial last line, or terminate a
    whole one, so that the new line stands alone."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = json.dumps(line, sort_keys=True) + "\n"
    with path.open("a+b") as file:
        file.seek(0)
        last = (content := file.read()).rpartition(b"\n")[2]
        if is_whole(last):
            file.write(b"\n")
        else:
            file.truncate(len(content) - len(last))
        file.write(text.encode())
        file.flush()
        os.fsync(file.fileno())


def is_whole(last: bytes) -> bool:
    """Return whether the text after the last line end is a result, and not cut off by a kill."""
    try:
        return "key" in json.loads(last)
    except (ValueError, TypeError):
        return False


def digits(counts: "list[int]") -> str:
    """Return counts of up to MAX_COUNT as a string with one character each, for result lines."""
    return "".join(DIGITS[count] for count in counts)


def counts_of(text: str) -> list[int]:
    return [int(character, 36) for character in text]
