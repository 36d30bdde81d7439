"""One shard of the rollout store: its name, which contains its sequence numbers, and its checksum.

A shard is a plain Parquet file (zstd) of the table STORE, with a checksum (see `checksums`). The
checksum verifies any copy, so the name can be the sequence numbers: an appended shard has one, a
compacted shard has all from `first` to `last`."""

import io
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import polars as pl

from tasks.common import checksums
from tasks.common.artifacts import STORE
from tasks.common.files import ArtifactError

KEYS = ["prompt_digest", "sample_index"]
# of a shard: one request writes it to an object store, and it is read into memory whole
MAX_BYTES = 64 * 2**20
NAME = re.compile(r"(?P<first>\d{10})-(?P<last>\d{10})\.parquet(?P<damaged>\.damaged)?")
UNREADABLE = (Exception, pl.exceptions.PanicException)
"""The errors that a Parquet reader may raise at damaged bytes: its own, errors of the libraries
below it, and a panic of one of them, which is not an Exception."""


@dataclass(frozen=True, order=True)
class Span:
    """The sequence numbers of a shard, `first` and `last` included. If a key is in two shards, the
    row in the span that sorts first wins."""

    first: int
    last: int

    @property
    def name(self) -> str:
        return f"{self.first:010d}-{self.last:010d}.parquet"

    def covers(self, other: "Span") -> bool:
        return self.first <= other.first and other.last <= self.last


def parse(name: str) -> tuple[Span, bool] | None:
    """Return the span in a shard's file name, and whether the name marks it as damaged. Return None
    for other files."""
    match = NAME.fullmatch(name)
    if match is None:
        return None
    return Span(int(match["first"]), int(match["last"])), bool(match["damaged"])


def live(spans: Iterable[Span]) -> list[Span]:
    """Return the spans in order, without spans that a compacted span covers.

    Compacted spans overlap if two machines compacted at once. Even then, the first row of a key is
    the same, because every shard that covers the key's lowest sequence number contains that row."""
    result: list[Span] = []
    for span in sorted(spans, key=lambda span: (span.first, -span.last)):
        if not result or span.last > result[-1].last:
            result.append(span)
    return result


def encode(rows: pl.DataFrame) -> bytes:
    """Return STORE rows as the bytes of a shard with its checksum."""
    # no statistics: the footer would contain whole completions as the smallest and largest text
    buffer = io.BytesIO()
    rows.write_parquet(buffer, compression="zstd", statistics=False, metadata=checksums.METADATA)
    checksums.add_checksum(buffer)
    return buffer.getvalue()


def encode_parts(rows: pl.DataFrame, max_bytes: int = MAX_BYTES) -> list[bytes]:
    """Return `rows` as one shard, or split in halves until each shard is within `max_bytes`."""
    content = encode(rows)
    if len(content) <= max_bytes or len(rows) == 1:
        return [content]
    half = len(rows) // 2
    return [*encode_parts(rows[:half], max_bytes), *encode_parts(rows[half:], max_bytes)]


def decode(content: bytes, columns: Sequence[str], where: str) -> pl.DataFrame:
    """Return the named columns of a shard, after verifying its checksum and its schema.

    Raise DamagedError for a damaged shard, and ArtifactError for one of another version."""
    checksums.verify_parquet(io.BytesIO(content))
    remedy = "use that version, or set store.location to another folder"
    other = f"{where} is undamaged, but another version of Winnow wrote it"
    try:
        found = pl.read_parquet_schema(io.BytesIO(content))
        if found == STORE.columns:
            return pl.read_parquet(io.BytesIO(content), columns=list(columns))
    except UNREADABLE as error:
        raise ArtifactError(f"{other} ({error}): {remedy}") from error
    raise ArtifactError(f"{other} (its columns are {list(found)}): {remedy}")
