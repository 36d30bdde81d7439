"""Tables: their columns, checksums, and errors."""

from dataclasses import replace
from pathlib import Path

import polars as pl
import pyarrow.parquet as pq
import pytest

from tasks.common import artifacts, checksums
from tasks.common.artifacts import PLAN, ROLLOUTS, TRAIN_ROLLOUTS, Table
from tasks.common.files import ArtifactError, digest_folder

TABLES = [value for value in vars(artifacts).values() if isinstance(value, Table)]


@pytest.mark.parametrize("table", TABLES, ids=lambda table: table.name)
def test_example_row_is_written_and_read(table: Table, tmp_path: Path) -> None:
    frame = table.frame([table.example])
    table.write(tmp_path / "t.parquet", frame)
    assert table.read(tmp_path / "t.parquet").to_dicts() == frame.to_dicts()
    assert None not in frame.row(0)


def test_wrong_columns_name_the_file(tmp_path: Path) -> None:
    frame = PLAN.frame([PLAN.example])
    with pytest.raises(
        ArtifactError,
        match=r"p\.parquet is not a plan table: missing: \['order'\]; unknown: \['rank'\]",
    ):
        PLAN.write(tmp_path / "p.parquet", frame.rename({"order": "rank"}))
    other = replace(PLAN, fields={**PLAN.fields, "group_size": (pl.Int64, 4)})
    other.write(tmp_path / "p.parquet", frame.with_columns(pl.col("group_size").cast(pl.Int64)))
    with pytest.raises(ArtifactError, match="group_size is Int64, not Int32"):
        PLAN.read(tmp_path / "p.parquet")
    (tmp_path / "p.parquet").write_bytes(b"PAR1 half a file")
    with pytest.raises(ArtifactError, match=r"p\.parquet is damaged, .* Delete it and run"):
        PLAN.read(tmp_path / "p.parquet")
    with pytest.raises(ArtifactError, match="does not exist: create it with `winnow run`"):
        PLAN.read(tmp_path / "absent.parquet")


@pytest.mark.parametrize("in_parts", [False, True])
def test_flipped_bits_of_a_table_are_detected(tmp_path: Path, in_parts: bool) -> None:
    path = tmp_path / "t.parquet"
    frame = ROLLOUTS.frame([{**ROLLOUTS.example, "text": f"{checksums.KEY}  {'0' * 64}"}] * 3)
    if in_parts:
        ROLLOUTS.write_parts(path, [frame[:1], frame[1:]])
    else:
        ROLLOUTS.write(path, frame)
    content = path.read_bytes()
    assert pq.read_table(path).num_rows == 3
    assert ROLLOUTS.read(path).height == 3
    for place in range(0, len(content), 7):
        damaged = bytearray(content)
        damaged[place] ^= 1 << (place % 8)
        path.write_bytes(damaged)
        with pytest.raises(ArtifactError, match=r"t\.parquet is damaged"):
            ROLLOUTS.read_columns(path, ["reward"])


def test_folder_digest_depends_on_names_and_contents(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("1")
    first = digest_folder(tmp_path)
    (tmp_path / "a.txt").rename(tmp_path / "b.txt")
    renamed = digest_folder(tmp_path)
    (tmp_path / "b.txt").write_text("2")
    assert len({first, renamed, digest_folder(tmp_path)}) == 3


def test_columns_are_read_without_the_others(tmp_path: Path) -> None:
    """The outcomes of chosen rows are read from a file whose texts are damaged."""
    path = tmp_path / "rollouts.parquet"
    rows = [
        {**ROLLOUTS.example, "sample_index": n, "text": f"a text {n}" * 100, "greedy": n == 2}
        for n in range(3)
    ]
    ROLLOUTS.write(path, ROLLOUTS.frame(rows))
    chunks = pq.ParquetFile(path).metadata.row_group(0)
    place = next(
        chunks.column(n)
        for n in range(chunks.num_columns)
        if chunks.column(n).path_in_schema == "text"
    )
    start = place.dictionary_page_offset or place.data_page_offset
    content = bytearray(path.read_bytes())
    content[start : start + place.total_compressed_size] = bytes(place.total_compressed_size)
    path.write_bytes(content)
    with path.open("r+b") as file:
        checksums.add_checksum(file)
    with pytest.raises(ArtifactError, match="cannot be read as Parquet"):
        ROLLOUTS.read(path)
    found = ROLLOUTS.read_columns(path, ["outcome", "sample_index"], where=~pl.col("greedy"))
    assert found.rows() == [("correct", 0), ("correct", 1)]


def test_missing_later_column_is_read_as_nulls(tmp_path: Path) -> None:
    fields = {k: v for k, v in TRAIN_ROLLOUTS.fields.items() if k != "versions"}
    before = replace(TRAIN_ROLLOUTS, fields=fields)
    row = dict(before.example)
    before.write(tmp_path / "old.parquet", before.frame([row]))
    found = TRAIN_ROLLOUTS.read(tmp_path / "old.parquet")
    assert found.equals(TRAIN_ROLLOUTS.frame([{**row, "versions": None}]))
    del fields["text"], row["text"]
    older = replace(TRAIN_ROLLOUTS, fields=fields)
    older.write(tmp_path / "older.parquet", older.frame([row]))
    with pytest.raises(ArtifactError, match=r"older.parquet is not a .* missing: \['text'\]"):
        TRAIN_ROLLOUTS.read_columns(tmp_path / "older.parquet", ["step"])
