"""The numbers of the report: a row per recipe and seed, a summary per recipe, and which policy is
the champion.

Profiling is added to a recipe's bill exactly if its strategy reads the profile. Validation during
training and the evaluation on test are measurements, the same for all: their FLOPs are shown
outside every total. Work lost to kills was executed, but the method does not need it, so it is not
charged."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import polars as pl

from tasks.common.ledger import ACCOUNTS
from tasks.report.evidence import Evidence, Trained

Row = dict[str, Any]
# the parts of the bill in every account
PARTS = ("profile", "generate", "score", "update")
# the values of a row that are summarised over the seeds
SUMMARISED = {
    "pass_at_1": lambda row: row["pass_at_1"],
    "greedy": lambda row: row["greedy"],
    "validation": lambda row: row["validation"],
    "flops_charged": lambda row: row["flops_charged"]["total"],
    "flops_charged_paper": lambda row: row["flops_charged_paper"]["total"],
    "flops_executed": lambda row: row["flops_executed"]["total"],
    "rollouts": lambda row: row["rollouts"],
    "tokens": lambda row: row["tokens"],
    "seconds": lambda row: row["seconds"]["total"],
}


def leaderboard(evidence: Evidence) -> list[Row]:
    """Return one row per recipe and seed, the best test pass@1 first, of equal ones the cheaper."""
    rows = [row_of(evidence, run) for run in evidence.trained]
    return sorted(
        rows, key=lambda r: (-r["pass_at_1"], r["flops_charged"]["total"], r["recipe"], r["seed"])
    )


def row_of(evidence: Evidence, run: Trained) -> Row:
    """Return what one training reached and everything it cost."""
    reads = evidence.plan(run.recipe).reads_profile
    bills = {f"flops_{account}": bill(evidence, run, account) for account in ACCOUNTS}
    return {
        "recipe": run.recipe,
        "seed": run.seed,
        "reads_profile": reads,
        "pass_at_1_initial": evidence.baseline["pass_at_1"],
        "greedy_initial": evidence.baseline["greedy"],
        **{
            key: run.metrics[key]
            for key in ("pass_at_1", "pass_at_1_low", "pass_at_1_high", "greedy", "pass_at")
        },
        "validation": run.curve["accuracy"][-1],
        "steps": len(run.steps),
        "rollouts": round(run.flops["rollouts"]["generate"]),
        "tokens": round(run.flops["tokens"]["generate"]),
        "rollouts_profile": round(evidence.profile_flops["rollouts"]["profile"]) if reads else 0,
        "tokens_profile": round(evidence.profile_flops["tokens"]["profile"]) if reads else 0,
        "tokens_lost": round(run.cost["lost"]["tokens"]),
        **bills,
        "flops_validation": run.flops["executed"]["evaluate"],
        "seconds": seconds(evidence, run),
    }


def bill(evidence: Evidence, run: Trained, account: str) -> dict[str, float]:
    """Return FLOPs by part in one account, and their total, which leaves out validation."""
    reads = evidence.plan(run.recipe).reads_profile
    parts = {part: float(run.flops[account][part]) for part in PARTS}
    parts["profile"] = float(evidence.profile_flops[account]["profile"]) if reads else 0.0
    if account == "executed":
        parts["lost"] = float(run.cost["lost"]["flops"])
    return {**parts, "total": sum(parts.values())}


def seconds(evidence: Evidence, run: Trained) -> dict[str, float]:
    """Return measured seconds: profiling (if the profile is read), training, work lost to kills,
    and their sum."""
    reads = evidence.plan(run.recipe).reads_profile
    parts = {
        "profile": float(evidence.profile_cost["seconds"]["profile"]) if reads else 0.0,
        "train": float(run.cost["seconds"]["train"]),
        "lost": float(run.cost["lost"]["seconds"]),
    }
    return {**parts, "total": sum(parts.values())}


def curve_table(evidence: Evidence) -> pl.DataFrame:
    """Return all validation curves in one table. For recipes that read the profile, FLOPs start
    where profiling ended."""
    curves = []
    for run in evidence.trained:
        offset = {
            account: bill(evidence, run, account)["profile"] for account in ("charged", "executed")
        }
        shifted = [pl.col(f"flops_{account}") + offset[account] for account in offset]
        named = run.curve.with_columns(*shifted).select(
            pl.lit(run.recipe).alias("recipe"),
            pl.lit(run.seed).alias("seed"),
            pl.lit(run.name).alias("run"),
            pl.all(),
        )
        curves.append(named)
    return pl.concat(curves)


def summarise(evidence: Evidence, rows: Sequence[Row]) -> dict[str, Any]:
    """Return the summary: `recipes` with mean, min and max over the seeds, `champion` and `why`,
    and the metrics of the initial policy."""
    recipes = {plan.recipe: summary_of(evidence, plan.recipe, rows) for plan in evidence.plans}
    champion, why = choose_champion(evidence, rows, recipes)
    keys = ("pass_at_1", "pass_at_1_low", "pass_at_1_high", "greedy", "num_prompts", "num_samples")
    initial = {key: evidence.baseline[key] for key in keys}
    reference = evidence.plans[0].recipe
    return {
        "initial": initial,
        "reference": reference,
        "recipes": recipes,
        "champion": champion,
        "why": why,
    }


def summary_of(evidence: Evidence, recipe: str, rows: Sequence[Row]) -> Row:
    """Return the summary of one recipe over its seeds."""
    mine = [row for row in rows if row["recipe"] == recipe]
    return {
        "num_seeds": len(mine),
        "reads_profile": evidence.plan(recipe).reads_profile,
        **{name: spread(mine, value) for name, value in SUMMARISED.items()},
        "pass_at_1_low": min(row["pass_at_1_low"] for row in mine),
        "pass_at_1_high": max(row["pass_at_1_high"] for row in mine),
        "flops_to_reference": flops_to_reference(evidence, recipe),
    }


def spread(rows: Sequence[Row], value: Callable[[Row], float]) -> dict[str, float]:
    """Return mean, smallest and largest value over the seeds."""
    values = [float(value(row)) for row in rows]
    return {"mean": float(np.mean(values)), "min": min(values), "max": max(values)}


def flops_to_reference(evidence: Evidence, recipe: str) -> float | None:
    """Return the charged FLOPs, profiling included, until the validation curve first reaches the
    first recipe's last accuracy, the mean over the seeds; None if a seed never reaches it.

    The first point of a noisy curve above a target is optimistic, for every recipe alike."""
    target = np.mean(
        [run.curve["accuracy"][-1] for run in evidence.seeds(evidence.plans[0].recipe)]
    )
    reached = []
    for run in evidence.seeds(recipe):
        there = run.curve.filter(pl.col("accuracy") >= target)
        if there.is_empty():
            return None
        reached.append(there["flops_charged"][0] + bill(evidence, run, "charged")["profile"])
    return float(np.mean(reached))


def choose_champion(
    evidence: Evidence, rows: Sequence[Row], recipes: dict[str, Row]
) -> tuple[dict[str, Any] | None, str]:
    """Return the policy to keep, or None, and the reason in words.

    Validation chooses the recipe (best mean) and its seed (best). Only that one policy is then
    compared with the initial policy on test: choosing by test accuracy would bias that accuracy
    upwards."""
    recipe = min(
        recipes,
        key=lambda r: (-recipes[r]["validation"]["mean"], recipes[r]["flops_charged"]["mean"]),
    )
    row = max(
        (row for row in rows if row["recipe"] == recipe),
        key=lambda r: (r["validation"], -r["seed"]),
    )
    initial = evidence.baseline["pass_at_1"]
    low = row["pass_at_1_low"]
    chosen = (
        f"{recipe}/{row['seed']} has the best validation accuracy ({row['validation']:.1%}); on "
        "test it reaches "
    )
    reached = f"{row['pass_at_1']:.1%} pass@1, and the lower end of its interval ({low:.1%})"
    if low > initial:
        kept = {
            key: row[key] for key in ("recipe", "seed", "validation", "pass_at_1", "pass_at_1_low")
        }
        return kept, f"{chosen}{reached} is above the initial policy's {initial:.1%}"
    return None, f"{chosen}{reached} is not above the initial policy's {initial:.1%}: no champion"
