"""The profile: the difficulty of every prompt for this policy, from a few graded samples each.

Recipes compute their filter, group sizes and order from it (sGPO, arXiv 2606.08854, section on
profiling: N = 8 samples under the initial policy, with the same sampler and limits as in
training)."""

from bisect import bisect_right
from typing import Any

import polars as pl

from tasks.common.artifacts import OUTCOMES, PROFILE
from tasks.common.files import ArtifactError
from tasks.common.statistics import fit_beta, mixed_probability, wilson_interval
from tasks.profile.stopping import Stopping

# the summary contains the share of mixed groups for these group sizes
GROUP_SIZES = (2, 4, 8, 16, 32)


def profile_prompts(rollouts: pl.DataFrame, stopping: Stopping | None = None) -> pl.DataFrame:
    """Return a PROFILE table, one row per prompt in the order of the ROLLOUTS table. `stopping` has
    the rules by which prompts stopped; None: every prompt has the same number of samples.

    The outcome `error` is a failure of Winnow, not of the policy. Samples with this outcome are
    counted in a separate column and excluded from the pass rate's denominator."""
    counts = [
        (pl.col("outcome") == outcome).sum().cast(pl.Int32).alias(outcome) for outcome in OUTCOMES
    ]
    profile = rollouts.group_by("prompt_id", maintain_order=True).agg(
        pl.len().cast(pl.Int32).alias("num_samples"),
        *counts,
        pl.col("prompt_tokens").first(),
        pl.col("completion_tokens").cast(pl.Int64).sum(),
        pl.col("completion_tokens").max().alias("completion_tokens_max"),
        (pl.col("finish_reason") == "length").mean().alias("truncated_rate"),
    )
    graded = profile["num_samples"] - profile["error"]
    low, high = wilson_interval(profile["correct"].to_numpy(), graded.to_numpy())
    rates = profile.select(pl.when(graded > 0).then(pl.col("correct") / graded)).to_series()
    profile = profile.with_columns(
        pass_rate=rates,
        pass_rate_unbiased=unbiased_rates(rollouts, stopping)
        if stopping and stopping.rules
        else rates,
        pass_rate_low=pl.Series(low).fill_nan(None),
        pass_rate_high=pl.Series(high).fill_nan(None),
    )
    return PROFILE.check(profile, "the profile")


def unbiased_rates(rollouts: pl.DataFrame, stopping: Stopping) -> pl.Series:
    """Return the unbiased pass rate of each prompt in a ROLLOUTS table, null without a grade."""
    is_graded, stages = pl.col("outcome") != "error", stopping.settings.stages
    ends = [(is_graded & (pl.col("sample_index") < stage)).sum() for stage in stages]
    counts = rollouts.group_by("prompt_id", maintain_order=True).agg(
        (pl.col("outcome") == "correct").sum().alias("correct"),
        pl.len().alias("num_samples"),
        *(end.alias(f"stage {number}") for number, end in enumerate(ends)),
    )
    rows = [
        (correct, tuple(graded[: bisect_right(stages, num_samples)]))
        for _, correct, num_samples, *graded in counts.iter_rows()
    ]
    return pl.Series(stopping.unbiased(rows), dtype=pl.Float64).fill_nan(None)


def summarize(profile: pl.DataFrame) -> dict[str, Any]:
    """Return counts of prompts by pass rate, the expected share of mixed groups (with a gradient)
    for each group size, and other values. Raise ArtifactError if no sample is graded."""
    graded = profile.filter(pl.col("pass_rate").is_not_null())
    if graded.is_empty():
        raise ArtifactError(
            "no sample of any prompt could be graded: fix the verifier or the gold answers"
        )
    correct = graded["correct"].to_numpy()
    trials = (graded["num_samples"] - graded["error"]).to_numpy()
    prior = fit_beta(correct, trials)
    histogram = graded.group_by("pass_rate").len().sort("pass_rate")
    return {
        "num_prompts": len(profile),
        "num_ungraded": len(profile) - len(graded),
        "pass_rate_mean": graded["pass_rate_unbiased"].mean(),
        "num_samples_mean": profile["num_samples"].mean(),
        "outcomes": {outcome: int(profile[outcome].sum()) for outcome in OUTCOMES},
        "histogram": [[rate, count] for rate, count in histogram.iter_rows()],
        "never_solved": int((graded["correct"] == 0).sum()),
        "always_solved": int((correct == trials).sum()),
        "mixed_rate": {
            str(size): float(mixed_probability(correct, trials, size, prior).mean())
            for size in GROUP_SIZES
        },
        "prior": list(prior),
    }
