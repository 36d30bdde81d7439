"""Graded rollouts, counted for each prompt.

An `error` is our own failure: it is left out of numerator and denominator. Every other outcome but
`correct` counts as a failure of the policy."""

import polars as pl


def score_prompts(rollouts: pl.DataFrame) -> pl.DataFrame:
    """Return one row per prompt: successes and trials of its samples (without errors), and the
    greedy success."""
    valid = pl.col("outcome") != "error"
    greedy = pl.col("greedy")
    return rollouts.group_by("prompt_id", maintain_order=True).agg(
        (valid & ~greedy & (pl.col("outcome") == "correct")).sum().cast(pl.Int64).alias("correct"),
        (valid & ~greedy).sum().cast(pl.Int64).alias("trials"),
        (pl.col("outcome") == "correct")
        .cast(pl.Float64)
        .filter(greedy & valid)
        .first()
        .alias("greedy"),
    )
