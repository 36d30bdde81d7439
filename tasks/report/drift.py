"""How the profile aged: the success of each group in training against what its prompt's profile
said to expect.

A profile describes the policy that was profiled. Training moves the policy away from it, and groups
that were sized by it come out too large or too small; this measures by how much, pass by pass.
Training never reads the profile, so all of it is worked out afterwards, from its rollouts.

A rollout is a success when its outcome is `correct`; an `error` was our fault, so it is neither a
success nor a failure, and the group is that much smaller. Prompts whose profile holds nothing but
errors are left out: there is nothing to compare with. A group that a recipe replays counts again
where it is replayed."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import polars as pl

from tasks.common.statistics import Floats, fit_beta, mixed_probability, wilson_interval

Drift = dict[str, Any]
MAX_VALUES, NUM_BINS = 12, 9


@dataclass(frozen=True)
class ReportSettings:
    """The section `report`."""

    stale_above: float


def drift_of(groups: pl.DataFrame, stale_above: float) -> Drift:
    """What became of the profile in one run: every pass, and whether the last one says that the
    profile is stale.

    Stale: the gap of the last pass is more than `stale_above` larger than chance alone would make
    it. Without the allowance for chance a short run of small groups would look stale with a
    perfectly fresh profile."""
    passes = passes_of(groups)
    if not passes:
        return {"stale": False, "drift": None, "gap": None, "chance": None, "passes": []}
    last = {key: passes[-1][key] for key in ("drift", "gap", "chance")}
    return {"stale": last["gap"] - last["chance"] > stale_above, **last, "passes": passes}


def groups_of(steps: pl.DataFrame, rollouts: pl.DataFrame, profile: pl.DataFrame) -> pl.DataFrame:
    """A row a group: pass, what it came to (`size`, `success`, `mixed`), and what was to be
    expected of it.

    `expected` is the posterior mean (a + k) / (a + b + n) of the prompt's pass rate, under the
    Beta(a, b) fitted on the whole profile, and not the estimate k / n itself. Prompts are
    *selected* by that estimate: one that came out at 1 of 8 is more often an easier prompt with bad
    luck than a harder one with good luck, whenever most prompts are easier. Drawn again by the very
    same policy, the selected regress to the mean of all, and a comparison with k / n would call
    that learning. `variance` is that of the success of a group this large about `expected`."""
    keys, solved = ["step", "group", "prompt_id"], (pl.col("outcome") == "correct").sum()
    graded = rollouts.filter(pl.col("outcome") != "error")
    groups = graded.group_by(keys, maintain_order=True).agg(
        pl.len().alias("size"), solved.alias("solved")
    )
    groups = groups.join(
        steps.select("step", "pass"), on="step", how="inner", maintain_order="left"
    )
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
        *foreseen(groups, prior),
    )


def bins(profile: pl.DataFrame) -> pl.Expr:
    """The bin of each pass rate: a bin for every value where there are few, else the nearest
    eighth."""
    rate = pl.col("pass_rate")
    if profile["pass_rate"].drop_nulls().n_unique() <= MAX_VALUES:
        return rate.rank("dense").cast(pl.Int32)
    return (rate * (NUM_BINS - 1) + 0.5).floor().cast(pl.Int32)


def foreseen(groups: pl.DataFrame, prior: tuple[float, float]) -> list[pl.Series]:
    """What the profile foresees of each group: `expected`, `variance` (beta-binomial) and
    `mixed_expected`."""
    correct, trials = groups["correct"].to_numpy(), groups["trials"].to_numpy()
    size, weight = groups["size"].to_numpy(), sum(prior) + trials
    expected = (prior[0] + correct) / weight
    variance = expected * (1 - expected) / size * (weight + size) / (weight + 1)
    mixed = mixed_probability(correct, trials, size, prior)
    return [
        pl.Series("expected", expected),
        pl.Series("variance", variance),
        pl.Series("mixed_expected", mixed),
    ]


def passes_of(groups: pl.DataFrame) -> list[Drift]:
    """A summary of each pass, in order."""
    parts = groups.sort("pass", maintain_order=True).group_by("pass", maintain_order=True)
    return [{"pass": int(str(number)), **pass_of(part)} for (number,), part in parts]


def pass_of(groups: pl.DataFrame) -> Drift:
    """One pass: its bins, and what they come to, every group counting the same.

    `drift` is the mean of success minus expected success, with its sign; `gap` the mean over the
    bins of the absolute difference, weighted by groups, so that easy prompts getting easier do not
    hide hard ones getting harder; `chance` the gap that the same groups would show on average if
    the policy were still the profiled one."""
    table = [
        bin_of(part)
        for _, part in groups.sort("bin", maintain_order=True).group_by("bin", maintain_order=True)
    ]
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
    """The groups of one pass whose prompts were profiled alike: profiled, expected and found
    success.

    `chance` is the mean absolute value of a normal variable as wide as the bin's mean success is
    when nothing moved."""
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
    """Wilson's 95 % interval of the mean success of groups, which are of prompts that differ.

    The rollouts of a group share a prompt, so they are worth fewer independent ones: as many as
    give the variance seen between the groups. At least one a group, at most as many as there are
    (`size` may differ from group to group); so the interval stays honest where all groups happen to
    agree."""
    share, num_groups = float(success.mean()), len(success)
    most = num_groups**2 / float((1 / size).sum())
    seen = float(success.var(ddof=1)) / num_groups if num_groups > 1 else 0.0
    trials = float(np.clip(share * (1 - share) / seen, num_groups, most)) if seen > 0 else most
    low, high = wilson_interval(share * trials, trials)
    return float(low), float(high)


def mean(values: pl.Series) -> float:
    return float(values.to_numpy().mean())
