"""Files of rows, and what ingest finds in them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tasks.common.params import section
from tasks.ingest import reading
from tasks.ingest.candidates import Rejection, Row
from tasks.ingest.reading import read
from tasks.ingest.settings import Ingest, Source
from tasks.ingest.spool import Spool

FIELDS = {
    "name": "mine",
    "prompt": "question",
    "answer": "gold",
    "level": None,
    "verifier": "numeric",
}
CHAIN_SUM = {
    "name": "chain_sum",
    "weight": 1.0,
    "config": {},
    "level": "num_terms",
    "verifier": "numeric",
}


def sources(entries: list[dict[str, Any]]) -> list[Source]:
    """The entries of `ingest.sources`, as params.yaml has them, checked."""
    return reading.sources(section({"ingest": {"sources": entries}}, "ingest", Ingest).sources)


def entry(path: Path | str, **changes: object) -> dict[str, Any]:
    """An entry of `ingest.sources` for a file of any format, its settings changed."""
    return {"preset": "mapping", "settings": {**FIELDS, "path": str(path), **changes}}


def preset(preset_name: str, path: Path | str, **settings: object) -> dict[str, Any]:
    return {"preset": preset_name, "settings": {"path": str(path), **settings}}


def found(
    *entries: dict[str, Any], max_characters: int | None = None
) -> tuple[list[Row], list[Rejection]]:
    """The clean rows of the sources and the others, before any two are compared."""
    items = [item for _, item in read(sources(list(entries)), max_characters, None)]
    return [item for item in items if isinstance(item, Row)], [
        item for item in items if isinstance(item, Rejection)
    ]


def lines(path: Path, *contents: object) -> Path:
    """A JSON Lines file; bytes are written as they are."""
    path.write_bytes(
        b"".join((c if isinstance(c, bytes) else json.dumps(c).encode()) + b"\n" for c in contents)
    )
    return path


def row(asked: str, answer: str = "1", line: int = 1, **changes: Any) -> Row:
    values = {
        "content": "raw",
        "prompt": asked,
        "messages": None,
        "template": None,
        "marker": "",
        "verifier": "numeric",
        "level": "",
        "source": "mine",
    }
    return Row(**{**values, "asked": asked, "answer": answer, "line": line, **changes})


def spool(
    folder: Path,
    *rows: Row | Rejection | tuple[int, Row | Rejection],
    seed: int = 0,
    question: Callable[[int, str, str], str] | None = None,
) -> Spool:
    """A spool of rows, each of entry 0 or of the one it is paired with, compared by `question`."""
    folder.mkdir(exist_ok=True)
    result = Spool(folder, seed)
    for item in rows:
        result.add(*(item if isinstance(item, tuple) else (0, item)))
    if question is not None:
        result.compare_by(question)
    return result.close()
