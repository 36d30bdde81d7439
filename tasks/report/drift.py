"""How stale the profile is: the success of each group in training, compared with the success that
its prompt's profile predicts.

A profile describes the policy that was profiled. Training changes the policy, and groups that were
sized by the profile become too large or too small. This module measures the change for each pass.
Training does not measure it, so everything is computed afterwards from the training rollouts.

A rollout is a success when its outcome is `correct`. An `error` is a failure of the system, not of
the policy, so it does not count towards the group's size. Prompts whose profile has only errors are
excluded, because there is no rate to compare with. Replayed rollouts are excluded: they count at
the step that sampled them."""

from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from tasks.common.statistics import Floats, fit_beta, mixed_probability, wilson_interval

Drift = dict[str, Any]
MAX_VALUES = 12  # up to this many different pass rates, each has its own bin
NUM_BINS = 9  # bins if there are more pass rates


def drift_of(groups: pl.DataFrame, stale_above: float) -> Drift:
    """Return the drift of one run: its `passes`, whether the profile is `stale` in the last one,
    and that pass's `drift`, `gap` and `chance`.

    The profile is stale if `gap` exceeds `chance` (the gap by chance alone) by over `stale_above`.
    Without `chance`, even a fresh profile would look stale after a few small groups."""
    passes = passes_of(groups)
    if not passes:
        return {"stale": False, "drift": None, "gap": None, "chance": None, "passes": []}
    last = {key: passes[-1][key] for key in ("drift", "gap", "chance")}
    return {"stale": last["gap"] - last["chance"] > stale_above, **last, "passes": passes}


def groups_of(steps: pl.DataFrame, rollouts: pl.DataFrame, profile: pl.DataFrame) -> pl.DataFrame:
    """Return a row per group: its pass, its result (`size`, `success`, `mixed`), and the profile's
    predictions.

    `expected` is the posterior mean (a + k) / (a + b + n) of the prompt's pass rate for k of n
    samples correct, not the raw k / n. The prior Beta(a, b) is fitted to the profile. Prompts are
    *selected* by k / n: if most prompts are easier, a prompt solved 1 time in 8 is more often an
    easier prompt with bad luck than a harder one with good luck. When the same policy samples
    again, the selected prompts regress to the mean, and a comparison with k / n would count that as
    learning. `variance` is the beta-binomial variance of `success` around `expected`, for a group
    of this size."""
    # size and successes of every group, with its pass
    keys = ["step", "group", "prompt_id"]
    solved = (pl.col("outcome") == "correct").sum()
    graded = rollouts.filter(pl.col("outcome") != "error")
    groups = graded.group_by(keys, maintain_order=True).agg(
        pl.len().alias("size"), solved.alias("solved")
    )
    groups = groups.join(
        steps.select("step", "pass"), on="step", how="inner", maintain_order="left"
    )
    # the profile of each group's prompt
    counted = profile.filter(pl.col("pass_rate").is_not_null()).select(
        "prompt_id",
        "correct",
        (pl.col("num_samples") - pl.col("error")).alias("trials"),
        pl.col("pass_rate").alias("profiled"),
        bins(profile).alias("bin"),
    )
    prior = fit_beta(counted["correct"], counted["trials"])
    groups = groups.join(counted, on="prompt_id", how="inner", maintain_order="left")
    return groups.with_columns(
        (pl.col("solved") / pl.col("size")).alias("success"),
        ((pl.col("solved") > 0) & (pl.col("solved") < pl.col("size"))).alias("mixed"),
        *predicted(groups, prior),
    )


def bins(profile: pl.DataFrame) -> pl.Expr:
    """Return an expression for the bin of each pass rate: one bin per value if there are at most
    MAX_VALUES, else the nearest eighth."""
    rate = pl.col("pass_rate")
    if profile["pass_rate"].drop_nulls().n_unique() <= MAX_VALUES:
        return rate.rank("dense").cast(pl.Int32)
    return (rate * (NUM_BINS - 1) + 0.5).floor().cast(pl.Int32)


def predicted(groups: pl.DataFrame, prior: tuple[float, float]) -> list[pl.Series]:
    """Return the profile's predictions for each group: the mean success `expected`, its `variance`
    (beta-binomial), and `mixed_expected`, the probability of a mixed group."""
    correct = groups["correct"].to_numpy()
    trials = groups["trials"].to_numpy()
    size = groups["size"].to_numpy()
    weight = sum(prior) + trials
    expected = (prior[0] + correct) / weight
    variance = expected * (1 - expected) / size * (weight + size) / (weight + 1)
    mixed = mixed_probability(correct, trials, size, prior)
    return [
        pl.Series("expected", expected),
        pl.Series("variance", variance),
        pl.Series("mixed_expected", mixed),
    ]


def passes_of(groups: pl.DataFrame) -> list[Drift]:
    parts = groups.sort("pass", maintain_order=True).group_by("pass", maintain_order=True)
    return [{"pass": int(str(number)), **pass_of(part)} for (number,), part in parts]


def pass_of(groups: pl.DataFrame) -> Drift:
    """Return the summary of one pass and its bins. All groups have equal weight.

    `drift` is the signed mean of success minus expected success. `gap` is the mean absolute
    difference over the bins, weighted by groups, so that easy prompts that become easier do not
    cancel hard prompts that become harder. `chance` is the gap that the same groups would show on
    average if the policy were still the profiled one."""
    parts = groups.sort("bin", maintain_order=True).group_by("bin", maintain_order=True)
    table = [bin_of(part) for _, part in parts]
    weights = [row["num_groups"] / len(groups) for row in table]
    gaps = [abs(row["success"] - row["expected"]) for row in table]
    return {
        "num_groups": len(groups),
        "group_size_mean": mean(groups["size"]),
        "expected": mean(groups["expected"]),
        "success": mean(groups["success"]),
        "drift": mean(groups["success"] - groups["expected"]),
        "gap": float(np.dot(weights, gaps)),
        "chance": float(np.dot(weights, [row.pop("chance") for row in table])),
        "mixed_rate": mean(groups["mixed"]),
        "mixed_rate_forecast": mean(groups["mixed_expected"]),
        "bins": table,
    }


def bin_of(groups: pl.DataFrame) -> Drift:
    """Return the profiled, the expected and the observed success (the last with its 95 % interval)
    of the groups in one bin of a pass.

    `chance` is the mean absolute deviation of the bin's mean success under an unchanged policy, in
    the normal approximation."""
    low, high = interval(groups["success"].to_numpy(), groups["size"].to_numpy())
    return {
        "num_groups": len(groups),
        "profiled": mean(groups["profiled"]),
        "expected": mean(groups["expected"]),
        "success": mean(groups["success"]),
        "success_low": low,
        "success_high": high,
        "chance": float(np.sqrt(2 / np.pi * mean(groups["variance"]) / len(groups))),
    }


def interval(success: Floats, size: npt.NDArray[Any]) -> tuple[float, float]:
    """Return Wilson's 95 % interval of the mean success of groups of different prompts.

    The rollouts of a group share a prompt, so they count as fewer independent rollouts: the number
    that explains the observed variance between the groups. It is at least one per group and at most
    the number of groups times the harmonic mean of `size`, so the interval is not too narrow if all
    groups happen to agree."""
    share = float(success.mean())
    num_groups = len(success)
    most = num_groups**2 / float((1 / size).sum())
    seen = float(success.var(ddof=1)) / num_groups if num_groups > 1 else 0.0
    trials = float(np.clip(share * (1 - share) / seen, num_groups, most)) if seen > 0 else most
    low, high = wilson_interval(share * trials, trials)
    return float(low), float(high)


def mean(values: pl.Series) -> float:
    return float(values.to_numpy().mean())


def stale_words(name: str, drift: Drift, *, reads_profile: bool) -> str:
    """Return a sentence on the stale profile of the run `name`. If the net drift is small, the
    sentence reports the gap instead."""
    if 2 * abs(drift["drift"]) >= drift["gap"]:
        how = (
            f"{100 * abs(drift['drift']):.0f} points {'more' if drift['drift'] > 0 else 'less'} "
            "often than profiled"
        )
    else:
        how = (
            f"{100 * drift['gap']:.0f} points away from what was profiled, some more and some less "
            "often"
        )
    second = (
        "a new profile of the trained policy would re-size groups"
        if reads_profile
        else "this recipe does not read it, but one that does would now size its groups wrongly"
    )
    return f"{name}: in the last pass prompts were solved {how}: the profile is stale; {second}"
