"""Tables keep their columns, and files appear whole or not at all."""

from pathlib import Path

import polars as pl
import pytest

from tasks.common.artifacts import PLAN, TABLES, Table
from tasks.common.files import ArtifactError, digest_folder, read_json, replace_file, write_json


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
    frame.with_columns(pl.col("group_size").cast(pl.Int64)).write_parquet(tmp_path / "p.parquet")
    with pytest.raises(ArtifactError, match="group_size is Int64, not Int32"):
        PLAN.read(tmp_path / "p.parquet")
    (tmp_path / "p.parquet").write_bytes(b"PAR1 half a file")
    with pytest.raises(ArtifactError, match=r"p\.parquet cannot be read"):
        PLAN.read(tmp_path / "p.parquet")
    with pytest.raises(ArtifactError, match="does not exist: run the stage"):
        PLAN.read(tmp_path / "absent.parquet")


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    write_json(path, {"b": 1})

    def fail(file: object) -> None:
        raise OSError("disk full")

    with pytest.raises(OSError, match="disk full"):
        replace_file(path, fail)
    assert read_json(path) == {"b": 1}
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.json"]


def test_folder_digest_sees_names_and_contents(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("1")
    first = digest_folder(tmp_path)
    (tmp_path / "a.txt").rename(tmp_path / "b.txt")
    renamed = digest_folder(tmp_path)
    (tmp_path / "b.txt").write_text("2")
    assert len({first, renamed, digest_folder(tmp_path)}) == 3
