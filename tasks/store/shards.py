"""One shard of the rollout store: its name, which holds its sequence numbers, and its checksum.

A shard is a plain Parquet file (zstd) of the table STORE. Its footer holds the sha256 of all its
bytes, computed with the 64 characters of the checksum itself as zeros. So a shard can be verified
wherever it is copied, and its name is free to hold its sequence numbers: an appended shard has one,
a compacted one all from `first` to `last`."""

import hashlib
import io
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import polars as pl

from tasks.common.artifacts import STORE
from tasks.common.files import ArtifactError

KEYS = ["prompt_digest", "sample_index"]
# of a shard: it is written in one request to an object store, and read into memory whole
MAX_BYTES = 64 * 2**20
CHECKSUM_KEY = "winnow-sha256"  # in the metadata of a shard's footer
BLANK_CHECKSUM = b"0" * 64  # in its place while the checksum is computed
# a shard's file name
NAME = re.compile(r"(?P<first>\d{10})-(?P<last>\d{10})\.parquet(?P<damaged>\.damaged)?")


UNREADABLE = (Exception, pl.exceptions.PanicException)
"""What a reader of Parquet may raise at damaged bytes: its own errors, those of the libraries below
it, and the panic of one of them, which is no Exception."""


class DamagedError(ArtifactError):
    """The bytes of a shard are not the ones that were written."""


@dataclass(frozen=True, order=True)
class Span:
    """The sequence numbers of a shard, both ends included. Of a duplicate key the smaller span
    wins."""

    first: int
    last: int

    @property
    def name(self) -> str:
        return f"{self.first:010d}-{self.last:010d}.parquet"

    def covers(self, other: "Span") -> bool:
        return self.first <= other.first and other.last <= self.last


def parse(name: str) -> tuple[Span, bool] | None:
    """Return the span in a shard's file name, and whether it is marked as damaged; None for other
    files."""
    match = NAME.fullmatch(name)
    if match is None:
        return None
    return Span(int(match["first"]), int(match["last"])), bool(match["damaged"])


def live(spans: Iterable[Span]) -> list[Span]:
    """Return the spans in order, without those that a compacted one covers.

    Compacted spans overlap when two machines compacted at once. The first row of a key is still the
    same: a shard that covers the earliest number where a key was written holds that row."""
    result: list[Span] = []
    for span in sorted(spans, key=lambda span: (span.first, -span.last)):
        if not result or span.last > result[-1].last:
            result.append(span)
    return result


def encode(rows: pl.DataFrame) -> bytes:
    """Return STORE rows as the bytes of a shard with its checksum."""
    # no statistics: the footer would hold whole completions as the smallest and largest text
    buffer = io.BytesIO()
    metadata = {CHECKSUM_KEY: BLANK_CHECKSUM.decode()}
    rows.write_parquet(buffer, compression="zstd", statistics=False, metadata=metadata)
    # the checksum of the file with a blank checksum replaces the blank one
    content = bytearray(buffer.getvalue())
    offset = checksum_offset(content)
    content[offset : offset + 64] = hashlib.sha256(content).hexdigest().encode()
    return bytes(content)


def encode_parts(rows: pl.DataFrame, max_bytes: int = MAX_BYTES) -> list[bytes]:
    """Return `rows` as one shard, or halved until each shard is within `max_bytes`."""
    content = encode(rows)
    if len(content) <= max_bytes or len(rows) == 1:
        return [content]
    half = len(rows) // 2
    return [*encode_parts(rows[:half], max_bytes), *encode_parts(rows[half:], max_bytes)]


def verify_checksum(content: bytes) -> None:
    """Raise DamagedError unless `content` is, byte for byte, what `encode` returned."""
    offset = checksum_offset(content)
    view = memoryview(content)
    checksum = hashlib.sha256(view[:offset])
    checksum.update(BLANK_CHECKSUM)
    checksum.update(view[offset + 64 :])
    if checksum.hexdigest().encode() != content[offset : offset + 64]:
        raise DamagedError("its content does not match its checksum")


def checksum_offset(content: bytes | bytearray) -> int:
    """Return where the checksum begins. It follows its key in the footer, behind all the text of
    completions, which could contain the key as well."""
    key = content.rfind(CHECKSUM_KEY.encode())
    offset = key + len(CHECKSUM_KEY) + 2  # Parquet puts the value's type and length between
    if key < 0 or offset + 64 > len(content):
        raise DamagedError("its end, with the checksum, is missing")
    return offset


def decode(content: bytes, columns: Sequence[str], where: str) -> pl.DataFrame:
    """Return the named columns of a shard after verifying its checksum and its schema.

    Raises DamagedError, or ArtifactError for an undamaged shard of another version."""
    verify_checksum(content)
    remedy = "use that version, or set store.location to another folder"
    other = f"{where} is undamaged, but another version of Winnow wrote it"
    try:
        found = pl.read_parquet_schema(io.BytesIO(content))
        if found == STORE.columns:
            return pl.read_parquet(io.BytesIO(content), columns=list(columns))
    except UNREADABLE as error:
        raise ArtifactError(f"{other} ({error}): {remedy}") from error
    raise ArtifactError(f"{other} (its columns are {list(found)}): {remedy}")
