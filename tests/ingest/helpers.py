"""Functions that write files of rows, and read them like the stage ingest."""

import json
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
DAPO = (
    "Solve the following math problem step by step. The last line of your response should be of "
    "the form Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n{}"
    '\n\nRemember to put your answer on its own line after "Answer:".'
)
CHAIN_SUM = {
    "name": "chain_sum",
    "weight": 1.0,
    "config": {},
    "level": "num_terms",
    "verifier": "numeric",
}


def sources(entries: list[dict[str, Any]]) -> list[Source]:
    """Return checked entries of `ingest.sources`, given as in params.yaml."""
    return reading.sources(section({"ingest": {"sources": entries}}, "ingest", Ingest).sources)


def entry(path: Path | str, **changes: object) -> dict[str, Any]:
    """Return an entry of `ingest.sources` for a file of any format, with changed settings."""
    return {"preset": "mapping", "settings": {**FIELDS, "path": str(path), **changes}}


def preset(preset_name: str, path: Path | str, **settings: object) -> dict[str, Any]:
    return {"preset": preset_name, "settings": {"path": str(path), **settings}}


def found(
    *entries: dict[str, Any], max_characters: int | None = None
) -> tuple[list[Row], list[Rejection]]:
    """Return the clean rows and the rejections of the sources, before rows are compared."""
    items = [item for _, item in read(sources(list(entries)), max_characters, None)]
    return [item for item in items if isinstance(item, Row)], [
        item for item in items if isinstance(item, Rejection)
    ]


def lines(path: Path, *contents: object) -> Path:
    """Write a JSON Lines file, and return its path. Bytes are written unchanged."""
    path.write_bytes(
        b"".join((c if isinstance(c, bytes) else json.dumps(c).encode()) + b"\n" for c in contents)
    )
    return path


def row(question: str, answer: str = "1", line: int = 1, **changes: Any) -> Row:
    values = {
        "content": "raw",
        "prompt": question,
        "messages": None,
        "template": None,
        "marker": "",
        "verifier": "numeric",
        "level": "",
        "source": "mine",
    }
    return Row(**{**values, "question": question, "answer": answer, "line": line, **changes})


def spool(
    folder: Path, *rows: Row | Rejection | tuple[int, Row | Rejection], seed: int = 0
) -> Spool:
    """Return a spool of rows. A row is of entry 0 by default."""
    folder.mkdir(exist_ok=True)
    result = Spool(folder, seed)
    for item in rows:
        result.add(*(item if isinstance(item, tuple) else (0, item)))
    return result.close()
