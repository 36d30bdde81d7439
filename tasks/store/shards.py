"""What one shard of the rollout store is: its name, which is its place in the store's order, and
its seal.

A shard is a plain Parquet file (zstd) of the table STORE. In its footer stands the sha256 of all
its bytes, taken with the 64 characters of the sum itself as zeros: a shard can be checked wherever
it was copied, and its name is free to say which places it stands for. An appended shard stands for
one place, a compacted one for all from `first` to `last`."""

import hashlib
import io
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import polars as pl

from tasks.common.artifacts import STORE
from tasks.common.files import ArtifactError

KEYS = ["prompt_digest", "sample_index"]
MAX_BYTES = (
    64 * 2**20
)  # of a shard: one request to an object store, and what reading one may need in memory
SEAL = "winnow-sha256"
BLANK = b"0" * 64
NAME = re.compile(r"(?P<first>\d{10})-(?P<last>\d{10})\.parquet(?P<damaged>\.damaged)?")


class DamagedError(ArtifactError):
    """The bytes of a shard are not those that were written."""


@dataclass(frozen=True, order=True)
class Span:
    """The places in the store's order, both ends included, that a shard stands for. Smaller is
    earlier, and wins."""

    first: int
    last: int

    @property
    def name(self) -> str:
        return f"{self.first:010d}-{self.last:010d}.parquet"

    def covers(self, other: "Span") -> bool:
        return self.first <= other.first and other.last <= self.last


def parse(name: str) -> tuple[Span, bool] | None:
    """The span that a file's name says, and whether it was set aside as damaged; None for other
    files."""
    match = NAME.fullmatch(name)
    return (
        (Span(int(match["first"]), int(match["last"])), bool(match["damaged"])) if match else None
    )


def live(spans: Iterable[Span]) -> list[Span]:
    """The spans in order, without those that a compacted one covers.

    Compacted spans may overlap, when two machines compacted at once. The first row of a key still
    is the same: whoever holds a key and covers its earliest place holds the row of that place."""
    result: list[Span] = []
    for span in sorted(spans, key=lambda span: (span.first, -span.last)):
        if not result or span.last > result[-1].last:
            result.append(span)
    return result


def encode(rows: pl.DataFrame) -> bytes:
    """A sealed shard of STORE rows."""
    buffer = io.BytesIO()
    # without statistics, or whole completions would stand in the footer as smallest and largest
    # text
    rows.write_parquet(
        buffer, compression="zstd", statistics=False, metadata={SEAL: BLANK.decode()}
    )
    content = bytearray(buffer.getvalue())
    place = seal_place(content)
    content[place : place + 64] = hashlib.sha256(content).hexdigest().encode()
    return bytes(content)


def encode_parts(rows: pl.DataFrame, max_bytes: int = MAX_BYTES) -> list[bytes]:
    """`rows` as one shard, or halved until each is within `max_bytes`."""
    content = encode(rows)
    if len(content) <= max_bytes or len(rows) == 1:
        return [content]
    half = len(rows) // 2
    return [*encode_parts(rows[:half], max_bytes), *encode_parts(rows[half:], max_bytes)]


def check_seal(content: bytes) -> None:
    """Raise DamagedError unless `content` is, byte for byte, what `encode` made."""
    place = seal_place(content)
    view = memoryview(content)
    checksum = hashlib.sha256(view[:place])
    checksum.update(BLANK)
    checksum.update(view[place + 64 :])
    if checksum.hexdigest().encode() != content[place : place + 64]:
        raise DamagedError("its content is not what its checksum says")


def seal_place(content: bytes | bytearray) -> int:
    """Where the checksum stands. It follows its key in the footer, after everything that
    completions could imitate."""
    key = content.rfind(SEAL.encode())
    place = key + len(SEAL) + 2  # Parquet puts the value's type and length between
    if key < 0 or place + 64 > len(content):
        raise DamagedError("its end, with the checksum, is missing")
    return place


def decode(content: bytes, columns: Sequence[str], where: str) -> pl.DataFrame:
    """The named columns of an unsealed or sealed shard, checked against STORE.

    Raises DamagedError, or ArtifactError for a shard that is whole and not of this version's
    making."""
    check_seal(content)
    found = pl.read_parquet_schema(io.BytesIO(content))
    if found != STORE.columns:
        raise ArtifactError(
            f"{where} is whole, but another version of Winnow wrote it: its columns are "
            f"{list(found)}"
        )
    return pl.read_parquet(io.BytesIO(content), columns=list(columns))
