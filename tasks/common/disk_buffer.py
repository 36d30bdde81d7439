"""Rows of a table too large for memory: added in any order, read back sorted, one part at a time.

The rows are in one unnamed file beside the output that is made from them, so the disk space is
released however the process ends. Left out: a merge of sorted runs. It is unnecessary, because a
row's number determines its part."""

import io
import tempfile
from pathlib import Path

import polars as pl

from tasks.common.files import writing

ROW = "row"  # the column with a row's number


class DiskBuffer:
    """Add rows, then read the parts. Part n contains the rows from n * `rows_per_part`, up to the
    next part. Use as a context manager."""

    def __init__(self, folder: Path, rows_per_part: int) -> None:
        self.folder = folder
        self.rows_per_part = rows_per_part
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            self.file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115, closed in `__exit__`
        self.pieces: dict[int, list[tuple[int, int]]] = {}  # per part: offset and bytes

    def __enter__(self) -> "DiskBuffer":
        return self

    def __exit__(self, *_: object) -> None:
        self.file.close()  # releases the disk space

    def add(self, rows: pl.DataFrame) -> None:
        """Store rows, numbered by their column `row`."""
        numbered = rows.with_columns(part=pl.col(ROW) // self.rows_per_part)
        for (part,), piece in numbered.partition_by(
            "part", include_key=False, as_dict=True
        ).items():
            self.write(int(part), piece)

    def write(self, part: int, piece: pl.DataFrame) -> None:
        # the oldest level copies only the piece, not the frame that it is a slice of
        buffer = io.BytesIO()
        piece.write_ipc(buffer, compression="lz4", compat_level=pl.CompatLevel.oldest())
        # released here: a buffer kept by a traceback crashes Python 3.12.1's garbage collector
        with buffer.getbuffer() as content, writing(self.folder):
            offset = self.file.seek(0, io.SEEK_END)
            self.file.write(content)
            self.file.flush()
            self.pieces.setdefault(part, []).append((offset, len(content)))

    def part(self, number: int) -> pl.DataFrame:
        """Return the rows of one part in order. If a row was added twice, the last one counts."""
        read = []
        for offset, length in self.pieces[number]:
            self.file.seek(offset)
            read.append(pl.read_ipc(io.BytesIO(self.file.read(length))))
        rows = pl.concat(read).sort(ROW, maintain_order=True)
        return rows.unique(ROW, keep="last", maintain_order=True)
