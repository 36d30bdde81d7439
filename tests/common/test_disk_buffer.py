"""Rows are buffered in a file in any order, and read in parts in order."""

import os
from pathlib import Path

import polars as pl
import pytest

from tasks.common.disk_buffer import DiskBuffer

TYPES = {"row": pl.UInt32, "text": pl.String, "parts": pl.List(pl.Struct({"score": pl.Float64}))}


def rows(*numbers: int, text: str = "text of") -> pl.DataFrame:
    data = [(n, f"{text} {n}", [{"score": n / 4}] * (n % 3)) for n in numbers]
    return pl.DataFrame(data, schema=TYPES, orient="row")


def test_parts_are_in_order_and_have_the_last_of_duplicate_rows(tmp_path: Path) -> None:
    with DiskBuffer(tmp_path, rows_per_part=4) as buffer:
        buffer.add(rows(9, 2, 5))
        buffer.add(rows(0, 8, 1, 4))
        buffer.add(rows(7, 3, 6))
        found = [buffer.part(number) for number in range(3)]
        buffer.add(rows(1, text="later"))
        assert buffer.part(0)["text"].to_list()[:2] == ["text of 0", "later 1"]
    assert [part["row"].to_list() for part in found] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    assert pl.concat(found).equals(rows(*range(10)))


def test_slice_is_stored_without_its_frame(tmp_path: Path) -> None:
    whole = rows(*range(1000), text=os.urandom(2000).hex())
    with DiskBuffer(tmp_path, rows_per_part=1) as buffer:
        buffer.add(whole[:2])
        assert os.fstat(buffer.file.fileno()).st_size < 20_000


@pytest.mark.parametrize("fails", [False, True])
def test_file_has_no_name(tmp_path: Path, fails: bool) -> None:
    """A killed process leaves no file behind."""
    try:
        with DiskBuffer(tmp_path / "out", rows_per_part=2) as buffer:
            buffer.add(rows(0))
            assert list((tmp_path / "out").iterdir()) == []
            if fails:
                raise KeyError
    except KeyError:
        pass
    assert list((tmp_path / "out").iterdir()) == []
