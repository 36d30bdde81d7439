"""Train, validation and test: by content, so that neither the order of the sources nor of their
rows matters.

Every prompt has a place in an order set by the seed and its own content; test takes the first
places, then validation, then train. A split that a source names takes rows of such sources only.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import polars as pl

from tasks.common.params import ParamsError
from tasks.common.stage import StageError
from tasks.ingest.duplicates import ALIVE, reject

NAMES = ("train", "validation", "test")


@dataclass(frozen=True)
class Sizes:
    """The section `ingest.splits`, in prompts. `train: null` takes all that are left."""

    train: int | None
    validation: int
    test: int


@dataclass(frozen=True)
class Share:
    """What an entry of `ingest.sources` says about where its rows go."""

    split: str | None
    weight: float | None
    max_rows: int | None


def check(sizes: Sizes) -> None:
    """ParamsError for a split without prompts."""
    for name in NAMES:
        size = getattr(sizes, name)
        if size is not None and size < 1:
            raise ParamsError(f"ingest.splits.{name} is {size}; a split needs at least one prompt")


def split(
    index: pl.DataFrame,
    sizes: Sizes,
    shares: Sequence[Share],
    contaminated: Callable[[pl.DataFrame, pl.DataFrame], pl.DataFrame],
) -> pl.DataFrame:
    """The index with `split`, null for rows that no split needed.

    `contaminated(train, evaluation)` names the rows of `train` (a part of the index) that must not
    be trained on, as `reject` takes them. StageError with the numbers when there are too few rows.
    """
    pool = index.filter(ALIVE).select("row", "entry", "folded", "place")
    pool = capped(pool, shares).sort("place", "row")
    chosen: list[pl.DataFrame] = []
    for name in ("test", "validation", "train"):
        named = name if any(share.split == name for share in shares) else None
        own = [entry for entry, share in enumerate(shares) if share.split == named]
        rows = pool.filter(pl.col("entry").is_in(own))
        if name == "train":
            bad = contaminated(rows, pl.concat(chosen))
            index = reject(index, bad)
            rows = rows.join(bad, on="row", how="anti", maintain_order="left")
        weights = {entry: weight for entry in own if (weight := shares[entry].weight) is not None}
        taken = take(rows, getattr(sizes, name), weights, f"{name}{rejections(index)}")
        pool = pool.join(taken, on="row", how="anti", maintain_order="left")
        chosen.append(taken.with_columns(split=pl.lit(name)))
    return index.join(
        pl.concat(chosen).select("row", "split"), on="row", how="left", maintain_order="left"
    )


def capped(rows: pl.DataFrame, shares: Sequence[Share]) -> pl.DataFrame:
    """At most `max_rows` of each entry, the first in the order of the splits."""
    if all(share.max_rows is None for share in shares):
        return rows
    caps = pl.DataFrame({"cap": [share.max_rows for share in shares]}, schema={"cap": pl.Int64})
    caps = caps.with_row_index("entry").cast({"entry": pl.UInt16})
    rank = pl.struct("place", "row").rank("ordinal").over("entry")
    kept = rows.join(caps, on="entry", maintain_order="left").filter(
        (rank <= pl.col("cap")).fill_null(True)
    )
    return kept.drop("cap")


def take(
    rows: pl.DataFrame, size: int | None, weights: dict[int, float], what: str
) -> pl.DataFrame:
    """The first `size` of `rows` (null: all); where entries have weights, each one's share (null:
    as many as its weight allows)."""
    if not weights:
        wanted = max(rows.height, 1) if size is None else size
        if rows.height < wanted:
            raise StageError(lacking(what, wanted, rows.height))
        return rows.head(wanted)
    available = dict.fromkeys(weights, 0) | {
        int(entry): n for entry, n in rows.group_by("entry").len().iter_rows()
    }
    total = sum(weights.values())
    if size is None:
        size = max(
            int(min(available[entry] * total / weight for entry, weight in weights.items())), 1
        )
    parts, sum_before, end = [], 0.0, 0
    for entry, weight in weights.items():
        sum_before, start = sum_before + weight, end
        end = round(size * sum_before / total)
        if available[entry] < end - start:
            raise StageError(
                lacking(
                    f"{what}: ingest.sources[{entry}], by its weight,",
                    end - start,
                    available[entry],
                )
            )
        parts.append(rows.filter(pl.col("entry") == entry).head(end - start))
    return pl.concat(parts).sort("place", "row")


def rejections(index: pl.DataFrame) -> str:
    """How many rows were rejected and why, in words for an error."""
    counts = (
        index.filter(~ALIVE)
        .group_by("reason")
        .len()
        .sort("len", "reason", descending=[True, False])
    )
    return (
        f" (rejected: {', '.join(f'{n} {reason}' for reason, n in counts.iter_rows()) or 'none'})"
    )


def lacking(what: str, wanted: int, available: int) -> str:
    return (
        f"the split {what} needs {wanted} prompts and {available} are left: lower ingest.splits, "
        "or add sources"
    )
