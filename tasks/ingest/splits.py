"""Split prompts into train, validation and test by their content, so that the order of sources and
rows does not matter.

Every prompt has a place in an order that depends on the seed and its own content. Test takes the
first places, then validation, then train. A split that a source names takes only rows of such
sources."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import polars as pl

from tasks.common.params import ParamsError
from tasks.common.stage import StageError
from tasks.ingest.duplicates import ALIVE, reject

NAMES = ("train", "validation", "test")


@dataclass(frozen=True)
class Sizes:
    """The section `ingest.splits`, in prompts. `train: null` takes all that remain."""

    train: int | None
    validation: int
    test: int


@dataclass(frozen=True)
class Share:
    """The settings of an entry of `ingest.sources` that decide where its rows go."""

    split: str | None
    weight: float | None
    max_rows: int | None


def check(sizes: Sizes) -> None:
    """Raise ParamsError for a split without prompts."""
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
    """Return the index with `split`, null for rows that no split needed.

    `contaminated(train, evaluation)` returns the rows of `train` (a part of the index) that must
    not be trained on, as `reject` takes them. Raises StageError with the numbers if there are too
    few rows."""
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
    """Keep at most `max_rows` of each entry, the first in the order of the splits."""
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
    """Return the first `size` of `rows` (None: all). If entries have weights, return each one's
    share (None: as many rows as the weights allow)."""
    if not weights:
        wanted = max(rows.height, 1) if size is None else size
        if rows.height < wanted:
            raise StageError(too_few(what, wanted, rows.height))
        return rows.head(wanted)
    available = dict.fromkeys(weights, 0) | {
        int(entry): n for entry, n in rows.group_by("entry").len().iter_rows()
    }
    total = sum(weights.values())
    if size is None:
        size = max(
            int(min(available[entry] * total / weight for entry, weight in weights.items())), 1
        )
    # rounding the cumulative shares, so that the parts sum to `size`
    parts = []
    cumulative = 0.0
    end = 0
    for entry, weight in weights.items():
        cumulative += weight
        start = end
        end = round(size * cumulative / total)
        if available[entry] < end - start:
            owner = f"{what}: ingest.sources[{entry}], by its weight,"
            raise StageError(too_few(owner, end - start, available[entry]))
        parts.append(rows.filter(pl.col("entry") == entry).head(end - start))
    return pl.concat(parts).sort("place", "row")


def rejections(index: pl.DataFrame) -> str:
    """Return the number of rejected rows by reason, as text for an error."""
    counts = index.filter(~ALIVE).group_by("reason").len()
    counts = counts.sort("len", "reason", descending=[True, False])
    phrases = ", ".join(f"{number} {reason}" for reason, number in counts.iter_rows())
    return f" (rejected: {phrases or 'none'})"


def too_few(what: str, wanted: int, available: int) -> str:
    """Return the message for a split with too few prompts."""
    return (
        f"the split {what} needs {wanted} prompts and {available} are left: lower ingest.splits, "
        "or add sources"
    )
