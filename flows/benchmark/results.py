"""The results file: one line of JSON for every finished cell, so that a table can be completed over
several sessions and machines. Lines are appended, and never deleted. The only later change is the
field `superseded`, the reason why a line no longer counts. Lines of a finished protocol are in a
compressed file (`.jsonl.zst`), whose lines come before those of the `.jsonl`. The facts of the
families are in a file beside it (`.facts.json`)."""

import json
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from tasks.common.files import ArtifactError, read_json, replace_file

Line = dict[str, Any]
DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
MAX_COUNT = len(DIGITS) - 1
COUNTS = bytes.maketrans(DIGITS.encode(), bytes(range(len(DIGITS))))


def files_of(path: Path) -> list[Path]:
    """Return the existing ones of the compressed file and `path`, in the order of their lines."""
    return [file for file in (path.with_suffix(".jsonl.zst"), path) if file.exists()]


def texts_of(file: Path) -> list[bytes]:
    """Return the lines of a file. The last is empty, or cut off by a kill."""
    try:
        return bytes(pa.input_stream(file).read()).split(b"\n")  # decompressed by its suffix
    except OSError as error:
        raise ArtifactError(f"{file} cannot be read, restore it: {error}") from error


def result_of(text: bytes) -> Line | None:
    """Return the result in a line, or None if there is none, or one cut off by a kill."""
    try:
        return line if "key" in (line := json.loads(text)) else None
    except (ValueError, TypeError):
        return None


def read_lines(path: Path) -> list[Line]:
    """Return every line of both files, including superseded ones; none if there is no file. A line
    cut off by a kill is skipped. Raise ArtifactError for a line that is not a result."""
    found: list[Line] = []
    for file in files_of(path):
        texts = texts_of(file)
        for number, text in enumerate(texts, 1):
            if line := result_of(text):
                found.append(line)
            elif text and number < len(texts):
                raise ArtifactError(f"{file}: line {number} is not a result: {text[:80]!r}")
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
    return sum(mark(file, keys, reason) for file in files_of(path))


def mark(file: Path, keys: Collection[str], reason: str) -> int:
    """Do what `supersede` does in one of the files."""
    texts, num = texts_of(file), 0
    for place, text in enumerate(texts):
        line = result_of(text) or {"superseded": "not a line"}
        if "superseded" not in line and line["key"] in keys:
            texts[place] = json.dumps({**line, "superseded": reason}, sort_keys=True).encode()
            num += 1
    whole = b"\n".join(texts)
    if file.suffix == ".zst":
        whole = pa.Codec("zstd", compression_level=19).compress(whole, asbytes=True)
    if num:  # else compressed again, with other bytes for the same lines
        replace_file(file, lambda stream: stream.write(whole))
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
        if result_of(last):
            file.write(b"\n")
        else:
            file.truncate(len(content) - len(last))
        file.write(text.encode())
        file.flush()
        os.fsync(file.fileno())


def digits(counts: "list[int]") -> str:
    """Return counts of up to MAX_COUNT as a string with one character each, for result lines."""
    return "".join(DIGITS[count] for count in counts)


def counts_of(text: str) -> list[int]:
    return list(text.encode().translate(COUNTS))
