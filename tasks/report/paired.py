"""Paired differences of pass@1 on test: how much better one policy is than another on the same
prompts.

The difficulty of a prompt affects the pass rates of both policies, and it cancels in their
difference. Two intervals that each include the variance over prompts can overlap although the
paired difference is clear, so the overlap of intervals is never used here."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from tasks.common.files import ArtifactError
from tasks.common.statistics import (
    POINT,
    bootstrap_interval,
    crossed_interval,
    equal_times,
    is_equal,
    noise_of,
    times_for_a_point,
    with_power,
)
from tasks.report.evidence import Evidence

Difference = dict[str, Any]
INITIAL = "initial"  # the name of the initial policy; runs have names of the form recipe/seed
# classes of pass rates: none right, three between, all right
CLASSES = ("0", "to 1/3", "to 2/3", "below 1", "1")


@dataclass(frozen=True)
class Paired:
    """The pass rate of every policy on every test prompt, and the number of draws for an interval.

    `rates` has a row per prompt: its `prompt_id`, and a column per policy, null where no sample
    could be graded."""

    rates: pl.DataFrame
    num_bootstrap: int


def pair(evidence: Evidence, num_bootstrap: int) -> Paired:
    """Return the pass rates of the initial policy and of all runs. Raise ArtifactError if a run was
    evaluated on different test prompts from the initial policy."""
    table = rates_of(evidence.baseline_scores, INITIAL)
    for run in evidence.trained:
        rates = rates_of(run.scores, run.name)
        if set(rates["prompt_id"]) != set(table["prompt_id"]):
            raise ArtifactError(
                f"{run.name} was evaluated on other test prompts than the initial policy: run "
                "`baseline` and `evaluate` again"
            )
        table = table.join(rates, on="prompt_id", how="left", maintain_order="left")
    return Paired(table, num_bootstrap)


def rates_of(scores: pl.DataFrame, name: str) -> pl.DataFrame:
    """Return a table with each prompt's pass rate in the column `name`, null without trials."""
    graded = pl.when(pl.col("trials") > 0).then(pl.col("correct") / pl.col("trials"))
    return scores.select("prompt_id", graded.alias(name))


def class_of(rates: pl.Series) -> npt.NDArray[np.int64]:
    """Return the index into CLASSES of each pass rate; the rates must not be null."""
    # the upper ends of the classes, inclusive
    return np.searchsorted([0.0, 1 / 3, 2 / 3, 1.0 - 1e-9], rates.to_numpy() - 1e-12)


def difference(paired: Paired, mine: Sequence[str], other: Sequence[str]) -> Difference:
    """Return mean pass@1 of the runs `mine` minus that of `other`, as a share, with its 95 %
    interval. The draws are the same in every run of the report, so equal files give equal reports.

    `other` contains the runs of the same seeds in the same order, or one run for all seeds. With
    several seeds (S) the interval is over seeds and prompts (P), otherwise over prompts (key
    `over`). `shows` is the true difference that is found significant with the probability POWER,
    `times` the factor of what the interval is over for a half width of one point. Raise
    ArtifactError if no prompt was graded for all of the runs."""
    graded = paired.rates.drop_nulls([*mine, *other])
    if graded.is_empty():
        raise ArtifactError(
            f"no test prompt was graded for all of {', '.join([*mine, *other])}: fix the verifier "
            "or the gold answers"
        )
    mine_SP = graded.select(mine).to_numpy().T
    other_SP = graded.select(other).to_numpy().T
    differences_SP = mine_SP - other_SP
    bounds, rng = (-1.0, 1.0), np.random.default_rng(0)
    is_crossed = len(mine) > 1 and len(graded) > 1
    values = differences_SP if is_crossed else differences_SP.mean(0)
    if is_crossed:
        low, high = crossed_interval(values, bounds)
    else:
        low, high = bootstrap_interval(values, paired.num_bootstrap, rng, bounds=bounds)
    half, noise = (high - low) / 2, noise_of(values[None]) if is_crossed else None
    times = times_for_a_point(noise) if noise else (half / POINT) ** 2
    return {
        "mean": float(differences_SP.mean()),
        "low": low,
        "high": high,
        "shows": with_power(half, noise),
        "times": equal_times(len(graded)) if is_equal(values) else times,
        "num_prompts": len(graded),
        "num_seeds": len(mine),
        "over": "seeds and prompts" if is_crossed else "prompts",
    }


def is_apart(interval: Difference) -> bool:
    """Return whether the interval of a difference excludes 0."""
    return bool(interval["low"] > 0 or interval["high"] < 0)


def points_words(interval: Difference) -> str:
    """Return a difference's interval as text, in percentage points."""
    return f"{100 * interval['low']:+.1f} to {100 * interval['high']:+.1f}"
