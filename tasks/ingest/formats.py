"""The rows of a local file: JSON Lines, a JSON array, CSV, TSV or Parquet, plain or in gzip or
zstd.

The format is decided by the name (`.jsonl.gz`), else by the first bytes; compression by the first
bytes only. A bad row is yielded as `Unreadable` with its text and affects no other row. So lines
are parsed here one by one: Polars, which reads Parquet here lazily and in batches, would reject a
whole text file for one bad byte, or guess. Only a JSON array is read whole; all other formats
stream."""

import csv
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO
from urllib.parse import urlsplit

import polars as pl
import pyarrow as pa

from tasks.common.files import ArtifactError

# the format of a file by the ending of its name
ENDINGS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
}
# compression by the first bytes of a file
COMPRESSED = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
BATCH_ROWS = 10_000  # of a Parquet file, read at a time
csv.field_size_limit(1 << 30)


@dataclass(frozen=True)
class Record:
    """One row: its number from 1 (in JSONL and CSV of the line it starts on), its raw text, its
    fields."""

    line: int
    content: str
    fields: dict[str, Any]


@dataclass(frozen=True)
class Unreadable:
    """A row that cannot be read, `undecodable` or `malformed`."""

    line: int
    content: str
    reason: str
    detail: str


def records(path: Path, location: str) -> Iterator[Record | Unreadable]:
    """Yield every row of the file at `path`, which came from `location`. Raises ArtifactError when
    the file is damaged."""
    try:
        kind = format_of(path, location)
        if kind == "parquet":
            yield from parquet(path, location)
        else:
            with decompressed(path) as file:
                yield from TEXT[kind](file, location)
    except (pl.exceptions.PolarsError, OSError, EOFError) as error:
        raise ArtifactError(
            f"{location.partition('?')[0]} is damaged: {error}. Get an undamaged copy"
        ) from error


def format_of(path: Path, location: str) -> str:
    """Return a value of ENDINGS, by the name in `location` or by the first bytes."""
    name = PurePosixPath(urlsplit(location).path if "://" in location else location)
    suffixes = [
        suffix.lower() for suffix in name.suffixes if suffix.lower() not in (".gz", ".zst", ".zstd")
    ]
    if suffixes and suffixes[-1] in ENDINGS:
        return ENDINGS[suffixes[-1]]
    with decompressed(path) as file:
        head = file.read(4096).removeprefix(BYTE_ORDER_MARK).lstrip()
    if head[:4] == b"PAR1":
        return "parquet"
    return {b"{": "jsonl", b"[": "json"}.get(head[:1], "csv")


def decompressed(path: Path) -> BinaryIO:
    """Return the file's content, decompressed as it is read."""
    with path.open("rb") as file:
        head = file.read(4)
    kind = next((name for magic, name in COMPRESSED.items() if head.startswith(magic)), None)
    return io.BufferedReader(pa.input_stream(str(path), compression=kind), 1 << 18)  # type: ignore[arg-type]


def parquet(path: Path, location: str) -> Iterator[Record]:
    """Yield the file's rows, read in batches."""
    rows = (
        row
        for batch in pl.scan_parquet(path, glob=False).collect_batches(
            chunk_size=BATCH_ROWS, lazy=True
        )
        for row in batch.iter_rows(named=True)
    )
    for number, row in enumerate(rows, 1):
        yield Record(number, as_json(row), row)


def json_lines(file: BinaryIO, location: str) -> Iterator[Record | Unreadable]:
    """Yield a row per line; blank lines are skipped."""
    for number, line in enumerate(file, 1):
        raw = line.rstrip(b"\r\n")
        if number == 1:
            raw = raw.removeprefix(BYTE_ORDER_MARK)
        if raw.strip():
            yield json_line(raw, number)


def json_line(raw: bytes, number: int) -> Record | Unreadable:
    """Return the row in one line."""
    try:
        content = raw.decode()
    except UnicodeDecodeError as error:
        return Unreadable(number, raw.decode(errors="backslashreplace"), "undecodable", str(error))
    try:
        value = json.loads(content)
    except (ValueError, RecursionError) as error:
        return Unreadable(number, content, "malformed", f"not JSON: {error}")
    return record_of(number, content, value)


def record_of(number: int, content: str, value: Any) -> Record | Unreadable:
    """Return a JSON value as a row, if it is an object."""
    if not isinstance(value, dict):
        return Unreadable(number, content, "malformed", f"{type(value).__name__}, not an object")
    return Record(number, content, value)


def json_array(file: BinaryIO, location: str) -> Iterator[Record | Unreadable]:
    """Yield the entries of one array. Bytes that are not UTF-8 become lone surrogates, and so
    affect only their entry."""
    try:
        values = json.loads(
            file.read().removeprefix(BYTE_ORDER_MARK).decode(errors="surrogateescape")
        )
    except (ValueError, RecursionError) as error:
        raise ArtifactError(
            f"{location.partition('?')[0]} is not JSON: {error}. Correct the file"
        ) from error
    if not isinstance(values, list):
        raise ArtifactError(
            f"{location.partition('?')[0]} holds {type(values).__name__}, not an array of rows: "
            "use an array, or JSON Lines"
        )
    for number, value in enumerate(values, 1):
        yield record_of(number, as_json(value), value)


def comma_separated(
    file: BinaryIO, location: str, delimiter: str = ","
) -> Iterator[Record | Unreadable]:
    """Yield rows under a header; a quoted field may contain line ends. All values are text, and an
    empty value is the empty text."""
    raw: list[str] = []  # the lines of the current row
    text = io.TextIOWrapper(file, "utf-8-sig", errors="surrogateescape", newline="")
    reader = csv.reader(RecordedLines(text, raw), delimiter=delimiter, strict=True)
    header = next(reader, [])
    if len(set(header)) < len(header):
        raise ArtifactError(
            f"{location.partition('?')[0]} names a column twice: {', '.join(header)}. Rename one"
        )
    while True:
        raw.clear()
        number = reader.line_num + 1
        try:
            values = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            yield Unreadable(number, printable("".join(raw)), "malformed", f"not CSV: {error}")
            continue
        content = printable("".join(raw).rstrip("\r\n"))
        if len(values) == len(header):
            yield Record(number, content, dict(zip(header, values, strict=True)))
        elif values:  # an empty line is skipped
            detail = f"{len(values)} fields where the header has {len(header)}"
            yield Unreadable(number, content, "malformed", detail)


class RecordedLines:
    """An iterator over lines that also appends each line to `record`."""

    def __init__(self, lines: Iterator[str], record: list[str]) -> None:
        self.lines = lines
        self.record = record

    def __iter__(self) -> "RecordedLines":
        return self

    def __next__(self) -> str:
        line = next(self.lines)
        self.record.append(line)
        return line


def tab_separated(file: BinaryIO, location: str) -> Iterator[Record | Unreadable]:
    """Yield rows as `comma_separated` does, with tabs between the fields."""
    return comma_separated(file, location, "\t")


def as_json(value: Any) -> str:
    """Return a value as JSON text, for the column `content`."""
    return printable(json.dumps(value, ensure_ascii=False, default=str))


def printable(text: str) -> str:
    """Return `text` with each lone surrogate written as its escape, so that any table can hold
    it."""
    return text.encode(errors="backslashreplace").decode()


TEXT = {"jsonl": json_lines, "json": json_array, "csv": comma_separated, "tsv": tab_separated}
