"""A checksum inside a Parquet file, so that damage is noticed wherever the file is copied.

The footer holds the sha256 of all bytes of the file, computed with the 64 characters of the
checksum itself as zeros. The file stays plain Parquet."""

import hashlib
import io
import os
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

from tasks.common.files import ArtifactError

KEY = "winnow-sha256"
BLANK = b"0" * 64  # in the checksum's place while it is computed
METADATA = {KEY: BLANK.decode()}
"""What the footer of a file that is to be sealed must hold."""

END = 8  # bytes: the footer's length and Parquet's magic number


class DamagedError(ArtifactError):
    """The bytes of a file are not the ones that were written."""


def seal(file: BinaryIO) -> None:
    """Write the checksum into an open Parquet file whose footer holds METADATA."""
    offset = checksum_offset(file)
    checksum = checksum_of(file, offset)
    file.seek(offset)
    file.write(checksum)
    file.seek(0, io.SEEK_END)


def verify(file: BinaryIO) -> None:
    """Raise DamagedError unless an open file is, byte for byte, what was sealed."""
    offset = checksum_offset(file)
    file.seek(offset)
    if file.read(len(BLANK)) != checksum_of(file, offset):
        raise DamagedError("its content does not match its checksum")


def verify_file(path: Path) -> None:
    """As `verify`, of the file at `path`; once for every state of it that this process reads."""
    status = os.stat(path)
    verify_state(path, status.st_ino, status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=256)
def verify_state(path: Path, inode: int, size: int, modified: int) -> None:
    with path.open("rb") as file:
        verify(file)


def checksum_of(file: BinaryIO, offset: int) -> bytes:
    """The checksum of an open file, whose place for it begins at `offset`."""
    checksum = hashlib.sha256()
    file.seek(0)
    left = offset
    while left and (piece := file.read(min(left, 1 << 20))):
        checksum.update(piece)
        left -= len(piece)
    checksum.update(BLANK)
    file.seek(offset + len(BLANK))
    while piece := file.read(1 << 20):
        checksum.update(piece)
    return checksum.hexdigest().encode()


def checksum_offset(file: BinaryIO) -> int:
    """Where the checksum begins. It follows its key in the footer; the rows before could contain
    the key as well."""
    size = file.seek(0, io.SEEK_END)
    file.seek(max(size - END, 0))
    start = size - END - int.from_bytes(file.read(4), "little")
    file.seek(max(start, 0))
    footer = file.read()
    key = footer.rfind(KEY.encode())
    offset = start + key + len(KEY) + 2  # Parquet puts the value's type and length between
    if start < 0 or key < 0 or offset + len(BLANK) > size:
        raise DamagedError("its end, with the checksum, is missing")
    return offset
