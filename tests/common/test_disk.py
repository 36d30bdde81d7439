"""Failed writes: each library's error becomes one sentence, and the old file is unchanged."""

import errno
import os
import sqlite3
from collections.abc import Callable
from contextlib import closing, contextmanager
from pathlib import Path
from typing import BinaryIO

import polars as pl
import pytest
from pyarrow.parquet import ParquetWriter

from tasks.common import files
from tasks.common.disk_buffer import ROW, DiskBuffer
from tasks.common.files import WriteError, replace_file, require_writable, write_json, writing
from tasks.common.locations import reaching
from tests.full import largest_file, remount, small_disk

BIG = pl.DataFrame({ROW: range(100_000), "noise": [os.urandom(32) for _ in range(100_000)]})
LIMIT = 100_000  # bytes, far below the size of BIG


def write_with_pyarrow(file: BinaryIO) -> None:
    table = BIG.to_arrow()
    with ParquetWriter(file, table.schema) as writer:
        writer.write_table(table)


WRITERS: dict[str, Callable[[BinaryIO], object]] = {
    "bytes": lambda file: file.write(os.urandom(10 * LIMIT)),
    "parquet": lambda file: BIG.write_parquet(file),
    "pyarrow": write_with_pyarrow,
}


@pytest.mark.parametrize("name", WRITERS)
def test_failed_write_is_one_sentence_and_keeps_the_old_file(name: str, tmp_path: Path) -> None:
    path = tmp_path / "table"
    path.write_text("old")
    with largest_file(LIMIT), pytest.raises(WriteError) as raised:
        replace_file(path, WRITERS[name])
    assert str(raised.value).startswith(f"{path}: the file would be larger than a process may ")
    assert str(raised.value).endswith("then run the same command again")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["table"]


def test_other_errors_are_unchanged() -> None:
    with pytest.raises(ZeroDivisionError), writing(Path("x")):
        raise ZeroDivisionError
    assert files.explain_write(FileNotFoundError(errno.ENOENT, "no", "x")) is None
    assert files.explain_write(ValueError("port 28")) is None


def test_full_database_is_a_full_disk(tmp_path: Path) -> None:
    path = tmp_path / "x.db"
    with closing(sqlite3.connect(path)) as database:
        database.execute("PRAGMA max_page_count = 2")
        database.execute("CREATE TABLE t (x)")
        with pytest.raises(WriteError) as raised, writing(path):
            database.execute("INSERT INTO t VALUES (zeroblob(100000))")
    assert str(raised.value).startswith(f"{path}: the disk is full: free some of it.")


def test_error_of_a_full_device(tmp_path: Path) -> None:
    """If another file than `path` is written, the message has the file name of the error."""
    with (
        pytest.raises(WriteError, match=f"{tmp_path}/x: the disk is full"),
        writing(tmp_path / "x"),
    ):
        Path("/dev/full").write_text("x")
    with pytest.raises(WriteError, match="/proc/none: "), writing(tmp_path / "x"):
        raise PermissionError(errno.EACCES, "Permission denied", "/proc/none")


def test_buffer_without_disk_space(tmp_path: Path) -> None:
    with (
        DiskBuffer(tmp_path / "profile", 1000) as buffer,
        largest_file(LIMIT),
        pytest.raises(WriteError, match=f"^{tmp_path}/profile: the file would be larger"),
    ):
        buffer.add(BIG)


def test_path_below_a_file_is_not_writable(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    place = tmp_path / "file" / "store"
    with pytest.raises(WriteError, match=f"^{place}: a part of this path is a file"):
        require_writable(place)
    with pytest.raises(WriteError, match=f"^{place}: a part of this path is a file"):
        write_json(place / "x.json", {})
    with pytest.raises(WriteError, match="a part of this path is a file"), reaching(str(place)):
        (place / "x").open("w")


def test_link_to_an_unmounted_disk_is_not_writable(tmp_path: Path) -> None:
    (tmp_path / "data").symlink_to(tmp_path / "unmounted")
    with pytest.raises(WriteError, match=f"^{tmp_path}/data: "):
        require_writable(tmp_path / "data")


def test_missing_folder_is_checked_in_its_parents(tmp_path: Path) -> None:
    require_writable(tmp_path / "a" / "b")
    assert os.listdir(tmp_path) == []


def test_less_than_a_mebibyte_is_refused(tmp_path: Path) -> None:
    with largest_file(files.PROBE_BYTES - 1), pytest.raises(WriteError, match="larger than"):
        require_writable(tmp_path)
    with largest_file(files.PROBE_BYTES):
        require_writable(tmp_path)


@contextmanager
def nobody():
    """Write as a user without rights if the tests run as root."""
    if os.geteuid():
        yield
        return
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


def test_folder_of_another_user(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with nobody():
        with pytest.raises(WriteError, match=f"^{tmp_path}: permission denied: give this user"):
            require_writable(tmp_path)
        with pytest.raises(WriteError, match=f"^{tmp_path}.*: permission denied: give this user"):
            write_json(tmp_path / "x", {})


def test_full_and_read_only_file_systems(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 2 << 20) as place:
        write_json(place / "old", {})
        with pytest.raises(WriteError, match=f"^{place}/new: the disk is full: free some of it"):
            replace_file(place / "new", lambda file: file.write(bytes(3 << 20)))
        with pytest.raises(WriteError, match=f"^{place}/new: the disk is full: free some of it"):
            replace_file(place / "new", lambda file: BIG.write_parquet(file))
        assert os.listdir(place) == ["old"]
        (place / "filling").write_bytes(bytes((2 << 20) - 8192))
        with pytest.raises(WriteError, match=f"^{place}/x: the disk is full"):
            require_writable(place / "x")
        remount(place, "ro")
        with pytest.raises(WriteError, match=f"^{place}/x: the file system is read-only: mount"):
            require_writable(place / "x")
        with pytest.raises(WriteError, match=f"^{place}/new: the file system is read-only"):
            write_json(place / "new", {})
