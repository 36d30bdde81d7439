"""Files of the pipeline that contain their own checksum, so that damage and manual edits are
noticed in every copy of a file.

The footer of a Parquet file contains the sha256 of all bytes of the file, computed with zeros in
place of the checksum's own 64 characters. The file stays plain Parquet. JSON files are objects:

    {
      "charged": {"generate": 1.2e9, ...},
      "winnow-sha256": "9f86d081884c7d65..."
    }

The checksum is the last key of the object, so the file stays plain JSON. It is computed from the
parsed values, written with sorted keys on one line. So the checked values are exactly those that
are used, and a reformatted file is still valid. Equal values result in equal files.

Files without a checksum: the metrics that DVC shows (`report/metrics`; DVC would show the key as a
metric, and no stage reads them), `report/leaderboard.json` (a list; its checksum is in
`report/summary.json`), and the digests of the code (no stage reads them, and the stage `code`
writes them before every run)."""

import hashlib
import io
import json
import logging
import os
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any, BinaryIO

from tasks.common.files import ArtifactError, digest_file, write_text
from tasks.common.recovery import how_to_restore

logger = logging.getLogger(__name__)

KEY = "winnow-sha256"
BLANK = b"0" * 64  # a placeholder during the computation
METADATA = {KEY: BLANK.decode()}
"""Metadata required in the footer of a file before its checksum is added."""

END = 8  # bytes: the footer's length and Parquet's magic number


class DamagedError(ArtifactError):
    """Raised if the bytes of a file differ from those that were written."""


# ------------------------------------------------------------------------------------------ JSON


class CheckedValues(dict[str, Any]):
    """The values of a file with a checksum. Looking up a missing key, at any depth outside lists,
    raises an ArtifactError naming the file, which is the wrong one or from an earlier version."""

    def __init__(self, path: Path, values: Mapping[str, Any]) -> None:
        super().__init__(
            {k: CheckedValues(path, v) if isinstance(v, dict) else v for k, v in values.items()}
        )
        self.path = path

    def __missing__(self, key: str) -> Any:
        raise ArtifactError(
            f"{self.path} has no {key}: it is another file, or from an earlier "
            f"version. {how_to_restore(self.path)}"
        )


def write_checked(path: Path, value: Mapping[str, Any]) -> None:
    """Write `value` and its checksum atomically as indented JSON."""
    write_text(path, encode(value))


def read_checked(path: Path) -> dict[str, Any]:
    """Read a file that `write_checked` wrote. Raise ArtifactError with the remedy if it is missing,
    damaged or edited. Looking up a missing key in the result also raises ArtifactError."""
    try:
        return CheckedValues(path, decode(path.read_bytes()))
    except FileNotFoundError as error:
        raise ArtifactError(f"{path} does not exist: create it with `winnow run`") from error
    except DamagedError as error:
        raise DamagedError(f"{path} {error}. {how_to_restore(path)}") from error


def read_note(path: Path) -> dict[str, Any]:
    """Read a file that `write_checked` wrote and on which no result depends. Return an empty
    dictionary if it is missing or, with a warning, if it is damaged."""
    try:
        return CheckedValues(path, decode(path.read_bytes()))
    except FileNotFoundError:
        return {}
    except DamagedError as error:
        logger.warning("%s %s: ignoring it", path, error)
        return {}


def read_note_of(path: Path, file: Path) -> dict[str, Any]:
    """Return the note of the run that wrote `file`. Return an empty dictionary if there is none, or
    if it is of another run: DVC restores a run's files, and not its note."""
    note = read_note(path)
    return note if file.is_file() and note.get("of") == digest_file(file) else {}


def encode(value: Mapping[str, Any]) -> str:
    """Return the values and their checksum as the text of a file."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False, allow_nan=False)
    plain = json.loads(text)  # keys as they will be read: JSON keys are strings
    return json.dumps({**plain, KEY: checksum(plain)}, indent=2, ensure_ascii=False) + "\n"


def decode(content: bytes) -> dict[str, Any]:
    """Return the values in a JSON file's bytes. Raise DamagedError if the checksum is invalid."""
    try:
        value = json.loads(content.decode())
    except (ValueError, RecursionError) as error:
        raise DamagedError(f"is damaged: it is not JSON ({error})") from error
    if not isinstance(value, dict) or KEY not in value:
        raise DamagedError(f"is damaged, or from an earlier version: it has no {KEY}")
    if value.pop(KEY) != checksum(value):
        raise DamagedError(f"is damaged, or was edited: its values do not match the checksum {KEY}")
    return value


def checksum(value: Any) -> str:
    """Return the sha256 of a JSON value, independent of the order of its keys."""
    text = json.dumps(value, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode(errors="surrogatepass")).hexdigest()


# --------------------------------------------------------------------------------------- Parquet


def add_checksum(file: BinaryIO) -> None:
    """Write the checksum into an open Parquet file whose footer contains METADATA."""
    offset = checksum_offset(file)
    checksum = checksum_of(file, offset)
    file.seek(offset)
    file.write(checksum)
    file.seek(0, io.SEEK_END)


def verify_parquet(file: BinaryIO) -> None:
    """Raise DamagedError unless the checksum in an open Parquet file matches its bytes."""
    offset = checksum_offset(file)
    file.seek(offset)
    if file.read(len(BLANK)) != checksum_of(file, offset):
        raise DamagedError("its content does not match its checksum")


def verify_file(path: Path) -> None:
    """Call `verify_parquet` for the file at `path`, once per process unless the file changes."""
    status = os.stat(path)
    verify_state(path, status.st_ino, status.st_size, status.st_mtime_ns)


@lru_cache(maxsize=256)
def verify_state(path: Path, inode: int, size: int, modified: int) -> None:
    with path.open("rb") as file:
        verify_parquet(file)


def checksum_of(file: BinaryIO, offset: int) -> bytes:
    """Return the checksum (64 hex digits) of an open file, computed with BLANK at `offset`."""
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
    """Return the offset of the checksum, which follows the last KEY in the footer. Only the footer
    is searched, because rows could contain KEY. Raise DamagedError if the footer is incomplete."""
    size = file.seek(0, io.SEEK_END)
    file.seek(max(size - END, 0))
    start = size - END - int.from_bytes(file.read(4), "little")
    file.seek(max(start, 0))
    footer = file.read()
    key = footer.rfind(KEY.encode())
    offset = start + key + len(KEY) + 2  # the value's type and length are in between
    if start < 0 or key < 0 or offset + len(BLANK) > size:
        raise DamagedError("its end, with the checksum, is missing")
    return offset
