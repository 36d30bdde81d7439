"""Limits on the size of rows, of decompressed files, and of tables.

A few kilobytes of zstd can expand to terabytes, and a file without line breaks is a single row. A
row above its limit is rejected; a file above its limit is read only up to it."""

import csv
import io
from collections.abc import Iterator
from pathlib import Path
from typing import IO, BinaryIO

import pyarrow as pa

MAX_ROW_BYTES = 16 << 20
MAX_WHOLE_BYTES = 2 << 30  # of JSON other than JSON Lines, which is read whole
MAX_EXPANSION = 1000  # of a compressed file or a table, ...
SMALLEST_LIMIT = 256 << 20  # ... but no limit is below this number of bytes
HEAD = 1000  # characters kept of a row above the limit
COMPRESSED = {b"\x1f\x8b": "gzip", b"\x28\xb5\x2f\xfd": "zstd"}  # by a file's first bytes
NOT_READ = {b"BZh": "bzip2", b"\xfd7zXZ": "xz", b"PK\x03\x04": "zip", b"7z\xbc\xaf": "7z"}


class TooLarge(Exception):
    """Raised if a file exceeds its limit, which is in the message."""

    def __init__(self, limit: int) -> None:
        super().__init__(
            f"it becomes more than {limit >> 20:,} MB, more than {MAX_EXPANSION} times its size; "
            "what follows is not read. If that is right, decompress it, or write a table as JSON "
            "Lines"
        )


class RowTooLarge(csv.Error):
    """Raised if a row exceeds the limit on its size."""

    def __init__(self) -> None:
        super().__init__(f"a row of more than {MAX_ROW_BYTES >> 20} MB")


class Bounded(io.RawIOBase):
    """A file that raises TooLarge if more than `limit` bytes of `source` are read."""

    def __init__(self, source: pa.NativeFile, limit: int) -> None:
        self.source, self.left, self.limit = source, limit, limit

    def readable(self) -> bool:
        return True

    def readinto(self, buffer) -> int:  # type: ignore[no-untyped-def]
        content = self.source.read(len(buffer))
        self.left -= len(content)
        if self.left < 0:
            raise TooLarge(self.limit)
        buffer[: len(content)] = content
        return len(content)

    def close(self) -> None:
        self.source.close()
        super().close()


def decompressed(path: Path) -> BinaryIO:
    """Return the file's content, decompressed as it is read. Reading it may raise TooLarge."""
    with path.open("rb") as file:
        head = file.read(4)
    kind = next((name for magic, name in COMPRESSED.items() if head.startswith(magic)), None)
    if kind is None:
        return path.open("rb", buffering=1 << 18)
    source = pa.input_stream(str(path), compression=kind)
    return io.BufferedReader(Bounded(source, limit_of(path)), 1 << 18)


def limit_of(path: Path) -> int:
    """Return the maximum size in bytes of a file's decompressed content."""
    return max(SMALLEST_LIMIT, MAX_EXPANSION * path.stat().st_size)


def packing(head: bytes) -> str | None:
    """Return the compression format of a text that is still compressed after `decompressed`,
    recognised by its first bytes; None for plain text."""
    known = {**COMPRESSED, **NOT_READ}
    return next((name for magic, name in known.items() if head.startswith(magic)), None)


def lines(file: BinaryIO) -> Iterator[tuple[int, bytes, bool]]:
    """Yield (number from 1, line, whether it was cut at MAX_ROW_BYTES) for each line."""
    number = 0
    while line := file.readline(MAX_ROW_BYTES + 1):
        number += 1
        is_cut = len(line) > MAX_ROW_BYTES
        if is_cut:
            skip_line(file, line)
        yield number, line, is_cut


def skip_line(file: IO[bytes] | IO[str], begun: bytes | str) -> None:
    """Read to the end of a partly read line; `begun` is the part already read."""
    end = "\n" if isinstance(begun, str) else b"\n"
    while begun and not begun.endswith(end):  # type: ignore[arg-type]
        begun = file.readline(MAX_ROW_BYTES)


class RecordedLines:
    """An iterator over a text's lines, which it also appends to `record`, the list of one row's
    lines. It raises RowTooLarge when the row exceeds the limit."""

    def __init__(self, text: io.TextIOWrapper, record: list[str]) -> None:
        self.text = text
        self.record = record
        self.size = 0  # of the record, in characters
        self.number = 0  # of lines read

    def __iter__(self) -> "RecordedLines":
        return self

    def __next__(self) -> str:
        line = self.text.readline(MAX_ROW_BYTES + 1)
        if not line:
            raise StopIteration
        self.number += 1
        self.size = len(line) + (self.size if self.record else 0)
        self.record.append(line)
        if self.size > MAX_ROW_BYTES:
            skip_line(self.text, line)
            raise RowTooLarge
        return line
