"""Read the rows of a local file: JSON Lines, JSON, CSV or TSV (plain, or compressed with gzip or
zstd), Parquet or Arrow.

The format is found by the file name (`.jsonl.gz`), or else by the first bytes; compression only by
the first bytes. A `.json` file may also be JSON Lines. JSON is an array of rows, or columns
(`{"question": [...]}`, `{"question": {"0": ...}}`), or an object with one key that contains the
rows (`{"version": 1, "examples": [...]}`).

A bad row is yielded as a `Rejection` with its text and affects no other row. This is why lines are
parsed one by one here: Polars (which reads Parquet here, lazily and in batches) would reject a
whole text file for one bad byte, or guess. JSON other than JSON Lines is read as a whole; all other
formats are streamed. Every row and every file is limited in size (`bounded`).

Not supported: a separate process for Parquet and Arrow. So a file crafted to crash its reader or to
exhaust memory kills the stage."""

import csv
import io
import itertools
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO
from urllib.parse import urlsplit

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
from polars import selectors

from tasks.common.files import ArtifactError
from tasks.ingest.fields import exact
from tasks.ingest.files import bounded
from tasks.ingest.files.bounded import RecordedLines, RowTooLarge, TooLarge, decompressed

ENDINGS = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "tsv",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
ARROW_FILE = b"ARROW1"
ARROW_STREAM = b"\xff\xff\xff\xff"
DAMAGE = (pl.exceptions.PolarsError, pa.ArrowException, OSError, EOFError)
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
BATCH_ROWS = 10_000  # rows of a table read at a time
MIN_ROWS, ROWS_PER_BYTE = 1_000_000, 100  # a table that claims more rows is damaged
csv.field_size_limit(1 << 30)


@dataclass(frozen=True)
class File:
    """The settings of a preset that only reads a file: its `path`."""

    path: str


@dataclass(frozen=True)
class Record:
    """One row: its number from 1 (in JSONL and CSV, that of its first line), its raw text, and its
    fields."""

    line: int
    content: str
    fields: dict[str, Any]


@dataclass(frozen=True)
class Rejection:
    """A row of the table `rejected`: `content` is its raw text. `line` counts from 1; for a
    generator, it is the number of the problem. An unreadable row has no `source` yet, and one of
    the reasons `undecodable`, `malformed`, `too_large`."""

    line: int
    content: str
    reason: str
    detail: str
    source: str = ""


def records(path: Path, location: str) -> Iterator[Record | Rejection]:
    """Yield every row of the file at `path`, which came from `location`. Raise ArtifactError if the
    file is damaged."""
    try:
        kind = format_of(path, location)
        if kind in TABLES:
            yield from table(path, kind)
        else:
            yield from text(path, kind, location)
    except DAMAGE as error:
        raise ArtifactError(
            f"{location.partition('?')[0]} is damaged: {error}. Get an undamaged copy"
        ) from error


def text(path: Path, kind: str, location: str) -> Iterator[Record | Rejection]:
    """Yield the rows of a text file; end with a rejection if its decompressed size is too large."""
    number = 0
    try:
        with decompressed(path) as file:
            for row in TEXT[kind](file, location):
                number = row.line
                yield row
    except TooLarge as error:
        yield Rejection(number + 1, "", "too_large", str(error))


def format_of(path: Path, location: str) -> str:
    """Find the format (ENDINGS) by name or first bytes. Raise ArtifactError for zip, bzip2, ..."""
    name = PurePosixPath(urlsplit(location).path if "://" in location else location)
    suffixes = [
        suffix.lower() for suffix in name.suffixes if suffix.lower() not in (".gz", ".zst", ".zstd")
    ]
    kind = ENDINGS.get(suffixes[-1]) if suffixes else None
    if kind in TABLES:
        return str(kind)
    with decompressed(path) as file:
        head = file.read(4096)
    if packed := bounded.packing(head):
        raise ArtifactError(
            f"{location.partition('?')[0]} is packed with {packed}, which is not read: unpack "
            "it, or pack it once with gzip or zstd"
        )
    if kind not in (None, "json"):
        return kind
    head = head.removeprefix(BYTE_ORDER_MARK).lstrip()
    if head[:4] == b"PAR1":
        return "parquet"
    if head.startswith((ARROW_FILE, ARROW_STREAM)):
        return "arrow"
    if head[:1] == b"{":
        return braced(path, alone="json" if kind else "jsonl")
    return kind or {b"[": "json"}.get(head[:1], "csv")


def braced(path: Path, alone: str) -> str:
    """Return the format of a text that begins with a brace: `jsonl` if each line is a row, `json`
    if one value spans several lines, and `alone` if there is a single line."""
    with decompressed(path) as file:
        lines = (line.removeprefix(BYTE_ORDER_MARK).strip() for _, line, _ in bounded.lines(file))
        first = list(itertools.islice(filter(None, lines), 2))
    if not first[0].endswith(b"}"):
        return "json"
    return "jsonl" if len(first) > 1 else alone


def table(path: Path, kind: str) -> Iterator[Record | Rejection]:
    """Yield the rows of a Parquet or Arrow file; end with a rejection if they are too large."""
    number, limit = 0, bounded.limit_of(path)
    left = limit
    for batch in batches(path, kind):
        left -= num_bytes(batch)
        if left < 0:
            yield Rejection(number + 1, "", "too_large", str(TooLarge(limit)))
            return
        # a 3.14 of 32 bits would become 3.140000104904175
        decimals = selectors.by_dtype(pl.Float32).cast(pl.String).cast(pl.Float64)
        for row in batch.with_columns(decimals).iter_rows(named=True):
            number += 1
            yield Record(number, as_json(row), row)


def batches(path: Path, kind: str) -> Iterator[pl.DataFrame]:
    """Yield the rows of a table in batches that do not span Parquet row groups. Raise OSError if
    the file claims more rows than it can contain."""
    if kind == "parquet":
        footer = pq.ParquetFile(path).metadata
        sizes = [footer.row_group(n).num_rows for n in range(footer.num_row_groups)]
    else:
        sizes = [batch.num_rows for batch in arrow_batches(path)]
    limit = max(MIN_ROWS, ROWS_PER_BYTE * path.stat().st_size)
    if sum(sizes) > limit or min(sizes, default=0) < 0:
        raise OSError(f"it claims {sum(sizes):,} rows, more than so small a file can have")
    if kind == "parquet":
        table = pl.scan_parquet(path, glob=False)
        for first, size in zip(itertools.accumulate(sizes, initial=0), sizes, strict=False):
            yield from table.slice(first, size).collect_batches(chunk_size=BATCH_ROWS, lazy=True)
        return
    for batch in arrow_batches(path):
        for start in range(0, batch.num_rows, BATCH_ROWS):
            yield pl.DataFrame(pl.from_arrow(batch.slice(start, BATCH_ROWS)))


def arrow_batches(path: Path) -> Iterator[pa.RecordBatch]:
    """Yield the batches of an Arrow file or stream."""
    with pa.memory_map(str(path)) as source:
        is_file = source.read(6) == ARROW_FILE
        source.seek(0)
        if is_file:
            reader = pa.ipc.open_file(source)
            yield from map(reader.get_batch, range(reader.num_record_batches))
        else:
            yield from pa.ipc.open_stream(source)


def num_bytes(batch: pl.DataFrame) -> int:
    """Return the bytes of the rows without dictionary encoding: a dictionary entry counts once for
    each row that uses it."""
    written_out = batch.cast({selectors.categorical() | selectors.enum(): pl.String})
    return int(written_out.to_arrow(compat_level=pl.CompatLevel.oldest()).nbytes)


def json_lines(file: BinaryIO, location: str) -> Iterator[Record | Rejection]:
    """Yield a row per line; blank lines are skipped."""
    for number, line, is_cut in bounded.lines(file):
        if is_cut:
            yield too_large(number, line.decode(errors="backslashreplace"))
            continue
        raw = line.rstrip(b"\r\n")
        if number == 1:
            raw = raw.removeprefix(BYTE_ORDER_MARK)
        if raw.strip():
            yield json_line(raw, number)


def too_large(number: int, content: str) -> Rejection:
    """Return the rejection of a row above the limit, with the beginning of its text."""
    return Rejection(number, printable(content[: bounded.HEAD]), "too_large", str(RowTooLarge()))


def json_line(raw: bytes, number: int) -> Record | Rejection:
    """Parse one line into a row, or a rejection."""
    try:
        content = raw.decode()
    except UnicodeDecodeError as error:
        return Rejection(number, raw.decode(errors="backslashreplace"), "undecodable", str(error))
    try:
        value = json.loads(content, parse_float=exact)
    except (ValueError, RecursionError) as error:
        return Rejection(number, content, "malformed", f"not JSON: {error}")
    return record_of(number, content, value)


def record_of(number: int, content: str, value: Any) -> Record | Rejection:
    """Return an object as a row, and an array of objects as a row's field `row`; reject others."""
    if is_array(value):
        value = {"row": value}
    if not isinstance(value, dict):
        return Rejection(number, content, "malformed", f"{type(value).__name__}, not an object")
    return Record(number, content, value)


def json_whole(file: BinaryIO, location: str) -> Iterator[Record | Rejection]:
    """Yield the rows of one JSON value. Bytes that are not UTF-8 become lone surrogates, so they
    affect only their row. Raise ArtifactError if the file is too large, not JSON, or not rows."""
    place = location.partition("?")[0]
    try:
        content = file.read(bounded.MAX_WHOLE_BYTES + 1)
        if len(content) > bounded.MAX_WHOLE_BYTES:
            raise ArtifactError(
                f"{place} is one JSON value of more than {bounded.MAX_WHOLE_BYTES >> 30} GB, which "
                "is read whole: make it JSON Lines"
            )
        text = content.removeprefix(BYTE_ORDER_MARK).decode(errors="surrogateescape")
        values = json.loads(text, parse_float=exact)
    except (ValueError, RecursionError) as error:
        raise ArtifactError(f"{place} is not JSON: {error}. Correct the file") from error
    rows = rows_of(values, place) if isinstance(values, dict) else values
    if not isinstance(rows, list):
        raise ArtifactError(
            f"{place} has {type(values).__name__}, not an array of rows: "
            "use an array, or JSON Lines"
        )
    for number, value in enumerate(rows, 1):
        yield record_of(number, as_json(value), value)


def rows_of(values: dict[str, Any], place: str) -> list[Any] | None:
    """Return the rows of a JSON object. In order of preference, these are the array of objects
    under its only key, its columns, or its only array of objects. Return None if it has none of
    these. Raise ArtifactError for several such arrays, and for columns of different lengths."""
    columns = list(values.values())
    kinds = {type(column) for column in columns}
    are_columns = kinds in ({list}, {dict})
    places = [range(len(c)) if isinstance(c, list) else c.keys() for c in columns if are_columns]
    is_even = all(other == places[0] for other in places)
    arrays = [name for name, column in values.items() if is_array(column)]
    if len(arrays) == 1 and (len(columns) == 1 or not are_columns or not is_even):
        return list(values[arrays[0]])
    if len(arrays) > 1 and not (are_columns and is_even):
        raise ArtifactError(
            f"{place} has several arrays of objects ({', '.join(arrays)}): make a file of the one "
            "that has the rows"
        )
    if not are_columns:
        return None
    if not is_even:
        lengths = ", ".join(f"{name} {len(c)}" for name, c in values.items())
        raise ArtifactError(f"{place} has columns of different rows ({lengths}): correct the file")
    return [{name: column[key] for name, column in values.items()} for key in places[0]]


def is_array(value: Any) -> bool:
    """Return whether a JSON value is an array of objects."""
    return isinstance(value, list) and bool(value) and all(isinstance(one, dict) for one in value)


def comma_separated(
    file: BinaryIO, location: str, delimiter: str = ","
) -> Iterator[Record | Rejection]:
    """Yield the rows below the header; a quoted field may contain line breaks. All values are text,
    and an empty field is an empty string. Raise ArtifactError for an unusable header."""
    raw: list[str] = []  # the lines of the current row
    text = io.TextIOWrapper(file, "utf-8-sig", errors="surrogateescape", newline="")
    lines = RecordedLines(text, raw)
    reader = csv.reader(lines, delimiter=delimiter, strict=True)
    try:
        header = next(reader, [])
    except csv.Error as error:
        fault = error if isinstance(error, RowTooLarge) else f"a row that is not CSV ({error})"
        message = f"begins with {fault}: it is not CSV with a header"
        raise ArtifactError(f"{location.partition('?')[0]} {message}") from error
    if len(set(header)) < len(header):
        raise ArtifactError(
            f"{location.partition('?')[0]} names a column twice: {', '.join(header)}. Rename one"
        )
    while True:
        raw.clear()
        number = lines.number + 1
        try:
            values = next(reader)
        except StopIteration:
            return
        except RowTooLarge:
            yield too_large(number, "".join(raw))
            continue
        except csv.Error as error:
            yield Rejection(number, printable("".join(raw)), "malformed", f"not CSV: {error}")
            continue
        content = printable("".join(raw).rstrip("\r\n"))
        if len(values) == len(header):
            yield Record(number, content, dict(zip(header, values, strict=True)))
        elif values:  # an empty line is skipped
            detail = f"{len(values)} fields where the header has {len(header)}"
            yield Rejection(number, content, "malformed", detail)


def as_json(value: Any) -> str:
    """Return a value as JSON text, for the column `content`."""
    return printable(json.dumps(value, ensure_ascii=False, default=as_written))


def as_written(value: Any) -> str:
    """Return text for a value that JSON cannot store; for bytes (such as an image): `<9 bytes>`."""
    return f"<{len(value)} bytes>" if isinstance(value, bytes) else str(value)


def printable(text: str) -> str:
    """Return `text` with each lone surrogate escaped, so that any table can store it."""
    return text.encode(errors="backslashreplace").decode()


TABLES = ("parquet", "arrow")
TEXT: dict[str, Callable[[BinaryIO, str], Iterator[Record | Rejection]]] = {
    "jsonl": json_lines,
    "json": json_whole,
    "csv": comma_separated,
    "tsv": partial(comma_separated, delimiter="\t"),
}
