"""The profile by source of prompts: whether a set of prompts can teach this policy anything.

A family of which most prompts are never solved has no signal, and one that a constant answer
solves as often as the policy rewards guessing. Left out: constant answers by meaning; golds are
compared as text."""

from typing import Any

import numpy as np
import polars as pl


def repetitions(rollouts: pl.DataFrame) -> pl.DataFrame:
    """Return the number of completions of each prompt in a ROLLOUTS table that repeat another one
    of the same prompt, as (prompt_id, repeated)."""
    repeated = (pl.len() - pl.col("text").n_unique()).cast(pl.Int32).alias("repeated")
    return rollouts.group_by("prompt_id", maintain_order=True).agg(repeated)


def by_source(
    prompts: pl.DataFrame, profile: pl.DataFrame, repeated: pl.DataFrame
) -> dict[str, dict[str, Any]]:
    """Return values of every source of the training `prompts` (PROMPTS), in order of name: the
    number of prompts, their mean pass rate, the shares never and always solved, the number of
    prompts with 0, 1, ... correct samples, the gold that most prompts have with their share, which
    is the accuracy of always answering it, and the shares of completions that were truncated and
    that repeat another one of their prompt."""
    table = profile.join(prompts.select("prompt_id", "source", "answer"), on="prompt_id")
    table = table.join(repeated, on="prompt_id").filter(pl.col("pass_rate").is_not_null())
    return {
        str(part["source"][0]): values_of(part)
        for part in table.sort("source", maintain_order=True).partition_by(
            "source", maintain_order=True
        )
    }


def values_of(part: pl.DataFrame) -> dict[str, Any]:
    """Return the values of one source (see `by_source`)."""
    columns = ("num_samples", "correct", "pass_rate", "truncated_rate", "repeated")
    samples, correct, rates, truncated, repeated = (part[name].to_numpy() for name in columns)
    unbiased = part["pass_rate_unbiased"].to_numpy()
    golds = (
        part["answer"].value_counts(sort=False).sort("count", "answer", descending=[True, False])
    )
    gold, most = golds.row(0)
    return {
        "num_prompts": len(part),
        "pass_rate_mean": float(unbiased.mean()),
        "never_solved_rate": float((correct == 0).mean()),
        "always_solved_rate": float((rates == 1.0).mean()),
        "successes": np.bincount(correct, minlength=samples.max() + 1).tolist(),
        "constant_answer": gold,
        "constant_rate": most / len(part),
        "truncated_rate": float(truncated @ samples / samples.sum()),
        "repeated_rate": float(repeated.sum() / samples.sum()),
    }
