"""A table of the pipeline: its columns, how it is checked, read and written.

It is checked when it is written and again when it is read, so a wrong column fails at the border
and names the file. It is sealed (`seal`), so that damage on the disk fails there as well."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import polars as pl
from pyarrow.parquet import ParquetWriter

from tasks.common import seal
from tasks.common.files import ArtifactError, replace_file
from tasks.common.remedy import remedy


@dataclass(frozen=True)
class Table:
    """One kind of table: its name, its columns, and a row to look at. Tables that were written
    before there were `later` columns are read with nulls in them."""

    name: str
    columns: Mapping[str, pl.DataType | type[pl.DataType]]
    example: Mapping[str, Any]
    later: tuple[str, ...] = ()

    def frame(self, rows: Iterable[Mapping[str, Any]]) -> pl.DataFrame:
        """A table from dictionaries, with exactly this table's columns and types."""
        return pl.DataFrame(list(rows), schema=dict(self.columns), orient="row")

    def check(self, frame: pl.DataFrame, where: str) -> pl.DataFrame:
        """Return `frame` with the columns in order; raise ArtifactError naming `where` and each
        difference."""
        missing = [name for name in self.columns if name not in frame.columns]
        unknown = [name for name in frame.columns if name not in self.columns]
        wrong = [
            f"{name} is {frame.schema[name]}, not {dtype}"
            for name, dtype in self.columns.items()
            if name in frame.columns and frame.schema[name] != dtype
        ]
        if missing or unknown or wrong:
            problems = (
                [f"missing: {missing}"] * bool(missing)
                + [f"unknown: {unknown}"] * bool(unknown)
                + wrong
            )
            raise ArtifactError(f"{where} is not a {self.name} table: {'; '.join(problems)}")
        return frame.select(list(self.columns))

    def write(self, path: Path, frame: pl.DataFrame) -> None:
        """Check and write `frame` as Parquet, whole or not at all."""
        checked = self.check(frame, str(path))

        def write_all(file: BinaryIO) -> None:
            checked.write_parquet(file, compression="zstd", metadata=seal.METADATA)
            seal.seal(file)

        replace_file(path, write_all)

    def write_parts(self, path: Path, parts: Iterable[pl.DataFrame]) -> None:
        """As `write`, of a table too large for memory, in parts."""
        empty = self.frame([]).to_arrow(compat_level=pl.CompatLevel.oldest())
        schema = empty.schema.with_metadata(seal.METADATA)

        def write_all(file: BinaryIO) -> None:
            with ParquetWriter(file, schema, compression="zstd") as writer:
                for part in parts:
                    writer.write_table(
                        self.check(part, str(path)).to_arrow(compat_level=pl.CompatLevel.oldest())
                    )
            seal.seal(file)

        replace_file(path, write_all)

    def read_columns(
        self, path: Path, columns: Sequence[str], where: pl.Expr | None = None
    ) -> pl.DataFrame:
        """Read some columns, of the rows `where` it holds. All columns are checked but only these
        are read: texts and tokens are gigabytes that few readers need. Errors as of `read`."""
        self.verify(path)
        try:
            rows = self.completed(pl.scan_parquet(path))
            self.check(rows.head(0).collect(), str(path))
            if where is not None:
                rows = rows.filter(where)
            return rows.select(list(columns)).collect()
        except (pl.exceptions.PolarsError, OSError) as error:
            raise ArtifactError(f"{path} cannot be read as Parquet: {error}") from error

    def read(self, path: Path) -> pl.DataFrame:
        """Read and check. Raises ArtifactError when the file is missing, damaged or of another
        shape."""
        self.verify(path)
        try:
            frame = self.completed(pl.scan_parquet(path)).collect()
        except (pl.exceptions.PolarsError, OSError) as error:
            raise ArtifactError(f"{path} cannot be read as Parquet: {error}") from error
        return self.check(frame, str(path))

    def completed(self, rows: pl.LazyFrame) -> pl.LazyFrame:
        """The rows with the columns that were not there when they were written."""
        there = rows.collect_schema().names()
        missing = {name: self.columns[name] for name in self.later if name not in there}
        return rows.with_columns(
            pl.lit(None, dtype=dtype).alias(name) for name, dtype in missing.items()
        )

    def verify(self, path: Path) -> None:
        """Raise ArtifactError when the file is missing, or is not what was written."""
        if not path.exists():
            raise ArtifactError(
                f"{path} does not exist: run the stage that makes the {self.name} table first"
            )
        try:
            seal.verify_file(path)
        except seal.DamagedError as error:
            raise ArtifactError(
                f"{path} is damaged, or of an earlier version: {error}. {remedy(path)}"
            ) from error
