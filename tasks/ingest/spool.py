"""All rows that were read, in the order of reading.

Texts are in Parquet files in a temporary folder. The index in memory has about fifty bytes
per row, so a million rows take little more memory than a thousand."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import polars as pl

from tasks.ingest.candidates import Rejection, Row
from tasks.ingest.questions.identity import keys, prompt_id, question_keys

CHUNK_ROWS = 20_000  # per file
PASS_ROWS = 50_000  # in memory at a time when rows are read in another order

TEXTS = {
    "row": pl.UInt32,
    "source": pl.String,
    "line": pl.Int64,
    "reason": pl.String,
    "detail": pl.String,
    "content": pl.String,
    "prompt_id": pl.String,
    "question": pl.String,
    "prompt": pl.String,
    "messages": pl.String,
    "template": pl.String,
    "answer": pl.String,
    "verifier": pl.String,
    "level": pl.String,
    "solution": pl.String,
}
OF_ROW = [name for name in TEXTS if name in Row.__dataclass_fields__]
INDEX = {
    "row": pl.UInt32,
    "entry": pl.UInt16,
    "source": pl.Categorical,
    "line": pl.UInt32,
    "reason": pl.Categorical,
    "text": pl.UInt64,
    "folded": pl.UInt64,
    "gold": pl.UInt64,
    "place": pl.UInt64,
}
"""`entry` is the position in `ingest.sources`; `reason` is null for rows that are not rejected; the
keys come from `identity.keys` and are null for rows that were rejected when read."""


class Spool:
    """A store of rows: add rows, then call `close`; after that, read them back in any order."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder = folder
        self.seed = seed
        self.num_rows = 0
        self.texts: list[dict[str, Any]] = []
        self.keys: list[dict[str, Any]] = []
        self.parts: list[pl.DataFrame] = []
        self.files: list[Path] = []
        self.index = pl.DataFrame(schema=INDEX)

    def add(self, entry: int, row: Row | Rejection) -> None:
        """Store one row of `ingest.sources[entry]`."""
        known = {"row": self.num_rows, "source": row.source, "line": row.line}
        if isinstance(row, Row):
            columns = {name: getattr(row, name) for name in OF_ROW}
            identity = prompt_id(row)
            self.texts.append({**columns, **known, "prompt_id": identity})
            self.keys.append({**known, "entry": entry, **keys(row, identity, self.seed)})
        else:
            self.texts.append(
                {**known, "reason": row.reason, "detail": row.detail, "content": row.content}
            )
            self.keys.append({**known, "entry": entry, "reason": row.reason})
        self.num_rows += 1
        if len(self.texts) >= CHUNK_ROWS:
            self.flush()

    def flush(self) -> None:
        """Write the rows in memory to the next file."""
        if self.texts:
            self.files.append(self.folder / f"{len(self.files):06d}.parquet")
            pl.DataFrame(self.texts, schema=TEXTS).write_parquet(self.files[-1], compression="lz4")
            self.parts.append(pl.DataFrame(self.keys, schema=INDEX))
        self.texts = []
        self.keys = []

    def compare_by(self, question: Callable[[int, str, str], str]) -> None:
        """Replace the compared text of every row by `question(entry, source, question)`. Files are
        rewritten one at a time."""
        self.flush()
        for number, file in enumerate(self.files):
            part = self.parts[number]
            old = pl.read_parquet(file, columns=["question"])["question"]
            rows = zip(part["entry"], part["source"].cast(pl.String), old, strict=True)
            questions = [text and question(entry, source, text) for entry, source, text in rows]
            new = pl.Series("question", questions, pl.String)
            if not new.equals(old):
                texts = pl.read_parquet(file).with_columns(new)
                texts.write_parquet(file, compression="lz4")
                self.parts[number] = part.with_columns(columns_of(questions))

    def close(self) -> "Spool":
        """Complete `index`; no rows can be added after this."""
        self.flush()
        self.index = pl.concat([self.index, *self.parts], rechunk=True)
        self.parts = []
        return self

    def chunks(self, *columns: str) -> Iterator[pl.DataFrame]:
        """Yield `row` and these columns of all rows in the order of reading, a file at a time."""
        for file in self.files:
            yield pl.read_parquet(file, columns=["row", *columns])

    def take(self, rows: pl.Series, *columns: str) -> pl.DataFrame:
        """Return `row` and these columns of TEXTS for the row numbers `rows`, in that order."""
        wanted = pl.DataFrame({"row": rows})
        if wanted.is_empty():
            return pl.DataFrame(schema={name: TEXTS[name] for name in ("row", *columns)})
        found = [
            compact(chunk.join(wanted, on="row", how="semi")) for chunk in self.chunks(*columns)
        ]
        return wanted.join(pl.concat(found), on="row", how="left", maintain_order="left")

    def ordered(self, rows: pl.Series, *columns: str) -> Iterator[pl.DataFrame]:
        """Yield the result of `take` in parts of at most PASS_ROWS rows."""
        for start in range(0, len(rows), PASS_ROWS):
            yield self.take(rows[start : start + PASS_ROWS], *columns)


def columns_of(questions: Sequence[str | None]) -> list[pl.Series]:
    """Return the index columns `text` and `folded`, null for rows without a question."""
    keys = [{} if text is None else question_keys(text) for text in questions]
    return [
        pl.Series(name, [each.get(name) for each in keys], pl.UInt64) for name in ("text", "folded")
    ]


def compact(frame: pl.DataFrame) -> pl.DataFrame:
    """Return a copy of a filtered table. Unlike the table, it does not keep the texts of the
    removed rows in memory."""
    copied = pl.from_arrow(frame.to_arrow(compat_level=pl.CompatLevel.oldest()))
    assert isinstance(copied, pl.DataFrame)
    return copied
