"""Split prompts into train, validation and test by their content, so that the order of sources and
rows does not matter.

Every prompt has a place in an order that depends only on the seed and its content. Test takes the
first places, then validation, then train. A split named by sources takes only rows of these
sources."""

from collections.abc import Callable, Sequence
from itertools import accumulate
from operator import sub

import polars as pl

from tasks.common.stage import StageError
from tasks.ingest.questions.duplicates import ALIVE, reject
from tasks.ingest.settings import Sizes, Source


def split(
    index: pl.DataFrame,
    sizes: Sizes,
    sources: Sequence[Source],
    contaminated: Callable[[pl.DataFrame, pl.DataFrame], pl.DataFrame],
) -> pl.DataFrame:
    """Return the index with contaminated rows rejected, and with `split` (null for unused rows).

    `contaminated(train, evaluation)` returns the rows of `train` (a part of the index) that must
    not be trained on, in the form that `reject` accepts. Raise StageError with the counts if there
    are too few rows."""
    pool = index.filter(ALIVE).select("row", "entry", "folded", "place")
    pool = capped(pool, sources).sort("place", "row")
    filled: list[pl.DataFrame] = []
    for name in ("test", "validation", "train"):
        named = name if any(source.split == name for source in sources) else None
        own = [entry for entry, source in enumerate(sources) if source.split == named]
        rows = pool.filter(pl.col("entry").is_in(own))
        if name == "train":
            bad = contaminated(rows, pl.concat(filled))
            index = reject(index, bad)
            rows = rows.join(bad, on="row", how="anti", maintain_order="left")
        weights = {entry: weight for entry in own if (weight := sources[entry].weight) is not None}
        taken = take(rows, getattr(sizes, name), weights, f"{name}{rejections(index)}")
        pool = pool.join(taken, on="row", how="anti", maintain_order="left")
        filled.append(taken.with_columns(split=pl.lit(name)))
    return index.join(
        pl.concat(filled).select("row", "split"), on="row", how="left", maintain_order="left"
    )


def capped(rows: pl.DataFrame, sources: Sequence[Source]) -> pl.DataFrame:
    """Return at most `max_rows` rows of each entry: the first in the order of `place`."""
    if all(source.max_rows is None for source in sources):
        return rows
    caps = pl.DataFrame({"cap": [source.max_rows for source in sources]}, schema={"cap": pl.Int64})
    caps = caps.with_row_index("entry").cast({"entry": pl.UInt16})
    rank = pl.struct("place", "row").rank("ordinal").over("entry")
    kept = rows.join(caps, on="entry", maintain_order="left").filter(
        (rank <= pl.col("cap")).fill_null(True)
    )
    return kept.drop("cap")


def take(
    rows: pl.DataFrame, size: int | None, weights: dict[int, float], what: str
) -> pl.DataFrame:
    """Return the first `size` of `rows`, or, with `weights`, each entry's share of `size`. Without
    `size`, return all, or as many as the weights allow. Raise StageError if there are too few."""
    if not weights:
        needed = max(rows.height, 1) if size is None else size
        if rows.height < needed:
            raise StageError(too_few(what, needed, rows.height))
        return rows.head(needed)
    available = dict.fromkeys(weights, 0) | dict(rows.group_by("entry").len().iter_rows())
    total = sum(weights.values())
    if size is None:
        most = min(available[entry] * total / weight for entry, weight in weights.items())
        size = max(int(most), 1)
        # rounding can give an entry a row more than its share
        while size > 1 and any(n > available[e] for e, n in parts(size, weights).items()):
            size -= 1
    taken = []
    for entry, number in parts(size, weights).items():
        if available[entry] < number:
            owner = f"{what}: ingest.sources[{entry}], by its weight,"
            raise StageError(too_few(owner, number, available[entry]))
        taken.append(rows.filter(pl.col("entry") == entry).head(number))
    return pl.concat(taken).sort("place", "row")


def parts(size: int, weights: dict[int, float]) -> dict[int, int]:
    """Return how many of `size` rows each entry gets, by weight. The cumulative shares are rounded,
    so that the numbers sum to `size`."""
    total = sum(weights.values())
    ends = [round(size * end / total) for end in accumulate(weights.values())]
    return dict(zip(weights, map(sub, ends, [0, *ends]), strict=False))


def rejections(index: pl.DataFrame) -> str:
    """Return the number of rejected rows by reason, as text for an error."""
    counts = index.filter(~ALIVE).group_by("reason").len()
    counts = counts.sort("len", "reason", descending=[True, False])
    phrases = ", ".join(f"{number} {reason}" for reason, number in counts.iter_rows())
    return f" (rejected: {phrases or 'none'})"


def too_few(what: str, needed: int, available: int) -> str:
    """Return the error message for a split with too few prompts."""
    return (
        f"the split {what} needs {needed} prompts and {available} are left: lower ingest.splits, "
        "or add sources"
    )
