"""The outcome of every row as a table: a line per source, with the rows of each split and the rows
rejected for each reason."""

import polars as pl

COLUMNS = ("read", "train", "validation", "test", "unused")


def table(index: pl.DataFrame) -> str:
    """Return the table as text; `index` has `reason` and `split`. `unused` counts good rows that no
    split needed."""
    fate = pl.coalesce(pl.col("reason").cast(pl.String), "split", pl.lit("unused"))
    counts = index.group_by(pl.col("source").cast(pl.String), fate=fate).len()
    reasons = (
        index["reason"].cast(pl.String).drop_nulls().value_counts(sort=True)["reason"].to_list()
    )
    names = [*COLUMNS, *reasons]
    numbers = {(source, what): number for source, what, number in counts.iter_rows()}
    rows = [["source", *names]]
    for source in index["source"].cast(pl.String).unique(maintain_order=True):
        cells = {name: numbers.get((source, name), 0) for name in names}
        cells["read"] = sum(cells.values())
        rows.append([source, *map(str, cells.values())])
    totals = [str(sum(int(row[column]) for row in rows[1:])) for column in range(1, len(names) + 1)]
    rows.append(["all", *totals])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(aligned(row, widths)) for row in rows)


def aligned(row: list[str], widths: list[int]) -> list[str]:
    """Return the cells padded: the first on the right, the numbers on the left."""
    return [
        row[0].ljust(widths[0]),
        *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)),
    ]
