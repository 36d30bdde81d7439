"""Rows with the same question: one is kept; if their golds differ, none can be trusted and all are
rejected. However, if the rows of sources for validation or test agree, only the rows that
contradict them are rejected.

Questions are compared by the 64-bit keys of the index (`spool.INDEX`), whatever their length."""

from collections.abc import Callable, Sequence

import polars as pl

# of equal rows, keep the one from the source with the earliest of these splits
EVAL_FIRST = {"test": 0, "validation": 1, None: 2, "train": 3}
HELD_OUT = pl.col("rank") < EVAL_FIRST[None]  # rows of a source for validation or test
ALIVE = pl.col("reason").is_null()  # rows that are not rejected


def differing(index: pl.DataFrame, key: str) -> pl.DataFrame:
    """Return the rows whose question, by this `key`, occurs with golds of different texts."""
    repeated = index.filter(ALIVE).filter(pl.col(key).is_duplicated())
    return repeated.filter(pl.col("gold").n_unique().over(key) > 1)


def unify(
    index: pl.DataFrame,
    golds: pl.DataFrame,
    key: str,
    equal: Callable[[Sequence[tuple[str, str, str]]], list[bool]],
) -> pl.DataFrame:
    """Return the index with one `gold` key for golds of the same question that a verifier judges
    equal (1,200 and 1200).

    `golds` has the row, answer and verifier of each row in `differing(index, key)`. Each gold is
    compared with the first gold of its question."""
    rows = golds.join(index.select("row", key, "gold"), on="row", maintain_order="left")
    first = pl.col("answer", "gold").first().over(key).name.prefix("first_")
    others = rows.with_columns(first).filter(pl.col("gold") != pl.col("first_gold"))
    same = equal(list(others.select("verifier", "answer", "first_answer").iter_rows()))
    merged = others.filter(pl.Series(same, dtype=pl.Boolean)).select("row", "first_gold")
    return (
        index.join(merged, on="row", how="left", maintain_order="left")
        .with_columns(gold=pl.coalesce("first_gold", "gold"))
        .drop("first_gold")
    )


def resolve(index: pl.DataFrame, splits: Sequence[str | None]) -> pl.DataFrame:
    """Return the index with `reason` set for duplicates and conflicts, and with `other`, the row
    that each of them repeats or contradicts. `splits` has the split that each entry names, or None.
    Of equal rows, the first in the order of EVAL_FIRST is kept."""
    ranks = dict(enumerate(map(EVAL_FIRST.__getitem__, splits)))
    repeated = index.filter(ALIVE).filter(pl.col("folded").is_duplicated())
    alive = repeated.with_columns(
        rank=pl.col("entry").cast(pl.Int64).replace_strict(ranks, return_dtype=pl.Int64)
    )
    alive = alive.sort("rank", "row").with_columns(
        first=pl.col("row").first().over("text"),
        first_gold=pl.col("gold").first().over("text"),
        num_golds=pl.col("gold").n_unique().over("text"),
        num_held_out=pl.col("gold").filter(HELD_OUT).n_unique().over("text"),
    )
    # conflicts: the same question with several golds; if the held-out rows agree, rows that agree
    # with them are kept. Rows with the first gold refer to the first row with another gold, all
    # others to the first row
    agrees = (pl.col("num_held_out") == 1) & (pl.col("gold") == pl.col("first_gold"))
    is_kept = (pl.col("num_golds") == 1) | agrees
    conflicts = alive.filter(~is_kept)
    contrary = (
        conflicts.filter(pl.col("gold") != pl.col("first_gold"))
        .group_by("text")
        .agg(pl.col("row").min().alias("contrary"))
    )
    conflicts = conflicts.join(contrary, on="text", maintain_order="left").select(
        "row",
        reason=pl.lit("conflicting_answers"),
        other=pl.when(pl.col("gold") == pl.col("first_gold")).then("contrary").otherwise("first"),
    )
    # duplicates: the same question up to case, with the same gold; all refer to the first row
    doubles = (
        alive.filter(is_kept)
        .with_columns(other=pl.col("row").first().over("folded", "gold"))
        .filter(pl.col("row") != pl.col("other"))
        .select("row", reason=pl.lit("duplicate"), other="other")
    )
    return reject(
        index.with_columns(other=pl.lit(None, dtype=pl.UInt32)), pl.concat([conflicts, doubles])
    )


def reject(index: pl.DataFrame, rejected: pl.DataFrame) -> pl.DataFrame:
    """Return the index with `reason` and `other` taken from `rejected` (row, reason, other)."""
    rejected = rejected.select(
        "row", new_reason=pl.col("reason").cast(pl.Categorical), new_other="other"
    )
    return (
        index.join(rejected, on="row", how="left", maintain_order="left")
        .with_columns(
            reason=pl.coalesce("reason", "new_reason"), other=pl.coalesce("other", "new_other")
        )
        .drop("new_reason", "new_other")
    )
