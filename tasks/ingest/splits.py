"""Split prompts into train, validation and test by their content, so that the order of sources and
rows does not matter.

Every prompt has a place in an order that depends only on the seed and its content. Test takes the
first places, then validation, then train. A split named by sources takes only rows of these
sources."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import sub

import polars as pl

from tasks.common.params import ParamsError
from tasks.common.stage import StageError
from tasks.ingest.questions.duplicates import ALIVE, reject
from tasks.ingest.settings import Sizes

NAMES = ("train", "validation", "test")


@dataclass(frozen=True)
class Share:
    """The settings of an entry of `ingest.sources` that decide where its rows go. `num_rows` is its
    maximum number of rows, if known before reading."""

    split: str | None
    weight: float | None
    max_rows: int | None
    num_rows: int | None = None

    def most(self) -> int | None:
        """Return the maximum number of rows of the entry; None if unknown."""
        return min((n for n in (self.max_rows, self.num_rows) if n is not None), default=None)


def check(sizes: Sizes, shares: Sequence[Share]) -> None:
    """Raise ParamsError for sizes that are invalid regardless of the sources' content."""
    for name in NAMES:
        size = getattr(sizes, name)
        named = [entry for entry, share in enumerate(shares) if share.split == name]
        if size is not None and size < (name == "train"):
            raise ParamsError(
                f"ingest.splits.{name} is {size}; it must be at least {int(name == 'train')}"
            )
        if size == 0 and named:
            raise ParamsError(
                f"ingest.splits.{name} is 0, and ingest.sources[{named[0]}] names that split: give "
                "it a size or null, or remove `split`"
            )
        if size is None and name != "train" and not named:
            raise ParamsError(
                f"ingest.splits.{name} is null, which takes all rows of the sources that name it, "
                f"and none does: give a number, or a source `split: {name}`"
            )
    check_most(sizes, shares)


def check_most(sizes: Sizes, shares: Sequence[Share]) -> None:
    """Raise ParamsError if splits need more rows than their sources can have."""
    for names, entries in pools(shares):
        wanted = [1 if (size := getattr(sizes, name)) is None else size for name in names]
        needs = f"the splits {', '.join(names)} need"
        weights = {entry: w for entry in entries if (w := shares[entry].weight) is not None}
        for entry in weights:
            need = sum(parts(size, weights)[entry] for size in wanted)
            most = shares[entry].most()
            if most is not None and most < need:
                raise ParamsError(
                    f"{needs} {need} prompts of ingest.sources[{entry}], by its weight, which has "
                    f"at most {most}: lower ingest.splits, or change the source"
                )
        known = [most for entry in entries if (most := shares[entry].most()) is not None]
        if len(known) == len(entries) and sum(known) < sum(wanted):
            raise ParamsError(
                f"{needs} {sum(wanted)} prompts, and their sources have at most {sum(known)}: "
                "lower ingest.splits, or add sources"
            )


def pools(shares: Sequence[Share]) -> Iterator[tuple[list[str], list[int]]]:
    """Yield groups of splits that take rows from the same entries, with these entries."""
    named = [share.split for share in shares]
    for split in (*NAMES, None):
        names = [name for name in NAMES if (name if name in named else None) == split]
        if names:
            yield names, [entry for entry, other in enumerate(named) if other == split]


def split(
    index: pl.DataFrame,
    sizes: Sizes,
    shares: Sequence[Share],
    contaminated: Callable[[pl.DataFrame, pl.DataFrame], pl.DataFrame],
) -> pl.DataFrame:
    """Return the index with the column `split`, null for rows that no split needed.

    `contaminated(train, evaluation)` returns the rows of `train` (a part of the index) that must
    not be trained on, in the form that `reject` accepts. Raise StageError with the counts if there
    are too few rows."""
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
    """Return at most `max_rows` rows of each entry, the first ones in the order of the splits."""
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
    """Return the first `size` of `rows` (None: all). If entries have weights, return each entry's
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
    taken = []
    for entry, number in parts(size, weights).items():
        if available[entry] < number:
            owner = f"{what}: ingest.sources[{entry}], by its weight,"
            raise StageError(too_few(owner, number, available[entry]))
        taken.append(rows.filter(pl.col("entry") == entry).head(number))
    return pl.concat(taken).sort("place", "row")


def parts(size: int, weights: dict[int, float]) -> dict[int, int]:
    """Return the number of rows of `size` for each entry, by weight. The cumulative shares are
    rounded, so that the numbers sum to `size`."""
    total = sum(weights.values())
    ends = [round(size * end / total) for end in accumulate(weights.values())]
    return dict(zip(weights, map(sub, ends, [0, *ends]), strict=False))


def rejections(index: pl.DataFrame) -> str:
    """Return the number of rejected rows by reason, as text for an error."""
    counts = index.filter(~ALIVE).group_by("reason").len()
    counts = counts.sort("len", "reason", descending=[True, False])
    phrases = ", ".join(f"{number} {reason}" for reason, number in counts.iter_rows())
    return f" (rejected: {phrases or 'none'})"


def too_few(what: str, wanted: int, available: int) -> str:
    """Return the error message for a split with too few prompts."""
    return (
        f"the split {what} needs {wanted} prompts and {available} are left: lower ingest.splits, "
        "or add sources"
    )
