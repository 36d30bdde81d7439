"""JSON Lines: one object a line, its fields named in the settings (nested ones with dots)."""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from tasks.common.locations import open_file
from tasks.ingest.candidates import Candidate, Rejection, field


@dataclass(frozen=True)
class Settings:
    """`name` is the `source` of the rows; `prompt`, `answer` and `level` (or null) are names of fields."""

    path: str
    name: str
    prompt: str
    answer: str
    level: str | None
    verifier: str


def read(settings: Settings) -> Iterator[Candidate | Rejection]:
    """Every line of the file as a candidate, or rejected as `undecodable` or `malformed`."""

    def candidate(line: int, content: str, record: dict[str, Any]) -> Candidate:
        level = field(record, settings.level) if settings.level else None
        prompt, answer = field(record, settings.prompt), field(record, settings.answer)
        return Candidate(settings.name, line, content, prompt, answer, settings.verifier, level)

    return read_lines(settings.path, settings.name, candidate)


def read_lines(
    path: str, name: str, candidate: Callable[[int, str, dict[str, Any]], Candidate | Rejection]
) -> Iterator[Candidate | Rejection]:
    """`candidate(line, content, record)` of every line that holds an object. Blank lines are no rows."""
    with open_file(path) as file:
        for line, raw in enumerate(file, 1):
            if raw.strip():
                yield read_line(raw.removeprefix(b"\xef\xbb\xbf").rstrip(b"\r\n"), line, name, candidate)


def read_line(
    raw: bytes, line: int, name: str, candidate: Callable[[int, str, dict[str, Any]], Candidate | Rejection]
) -> Candidate | Rejection:
    """One line. A byte that is not UTF-8 costs this line, not the file."""
    try:
        content = raw.decode()
    except UnicodeDecodeError as error:
        return Rejection(name, line, "undecodable", str(error), raw.decode(errors="backslashreplace"))
    try:
        record = json.loads(content)
    except (ValueError, RecursionError) as error:
        return Rejection(name, line, "malformed", f"not JSON: {error}", content)
    if not isinstance(record, dict):
        return Rejection(name, line, "malformed", f"{type(record).__name__}, not an object", content)
    return candidate(line, content, record)
