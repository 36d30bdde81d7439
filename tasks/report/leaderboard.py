"""The numbers of the report: a row per recipe and seed, a summary per recipe, and which policy is
the champion. Policies are compared by the paired differences of `paired`.

Profiling is added to a recipe's bill exactly if its strategy reads the profile. Validation during
training and the evaluation on test are measurements, the same for all: their FLOPs are shown
outside every total. Work lost to kills was executed, but the method does not need it, so it is not
charged."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import polars as pl

from tasks.common.ledger import ACCOUNTS
from tasks.report.curves import AXES, COMPARED, Fitted, comparable, fit_curve
from tasks.report.evidence import Evidence, Trained
from tasks.report.headline import headline
from tasks.report.paired import INITIAL, Difference, Paired, difference

Row = dict[str, Any]
Fits = Mapping[str, Mapping[str, Fitted]]  # by recipe, then axis
BASELINE = "grpo"  # the recipe that others are compared with, if it is in the experiment
# the account that says which of two equal policies was cheaper: nobody pays for dead groups in it
CHEAPER = "flops_charged_mixed"
# the parts of the bill in every account
PARTS = ("profile", "generate", "score", "update")
# the values of a row that are summarised over the seeds
SUMMARISED = {
    "pass_at_1": lambda row: row["pass_at_1"],
    "greedy": lambda row: row["greedy"],
    "validation": lambda row: row["validation"],
    "flops_charged": lambda row: row["flops_charged"]["total"],
    "flops_charged_mixed": lambda row: row["flops_charged_mixed"]["total"],
    "flops_charged_paper": lambda row: row["flops_charged_paper"]["total"],
    "flops_executed": lambda row: row["flops_executed"]["total"],
    "rollouts": lambda row: row["rollouts"],
    "tokens": lambda row: row["tokens"],
    "seconds": lambda row: row["seconds"]["total"],
}


def leaderboard(evidence: Evidence, paired: Paired) -> list[Row]:
    """Return one row per recipe and seed, the best test pass@1 first, of equal ones the cheaper."""
    rows = [row_of(evidence, run, paired) for run in evidence.trained]
    return sorted(
        rows, key=lambda r: (-r["pass_at_1"], r[CHEAPER]["total"], r["recipe"], r["seed"])
    )


def row_of(evidence: Evidence, run: Trained, paired: Paired) -> Row:
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
        "over_initial": compare(paired, [run.name], [INITIAL]),
        "validation": run.curve["accuracy"][-1],
        "steps": len(run.steps),
        "rollouts": round(run.flops["rollouts"]["generate"]),
        "tokens": round(run.flops["tokens"]["generate"]),
        "rollouts_profile": round(evidence.profile_flops["rollouts"]["profile"]) if reads else 0,
        "tokens_profile": round(evidence.profile_flops["tokens"]["profile"]) if reads else 0,
        "tokens_lost": round(run.cost["lost"]["tokens"]),
        **bills,
        "flops_validation": run.flops["executed"]["evaluate"],
        "flops_branches": run.flops["executed"]["branch"],
        "seconds": seconds(evidence, run),
    }


def compare(paired: Paired, mine: Sequence[str], other: Sequence[str]) -> Difference:
    """Return a paired difference. Its draws are the same in every run of the report, so that equal
    files give equal reports."""
    return difference(paired, mine, other, np.random.default_rng(0))


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


def fit_curves(evidence: Evidence, num_bootstrap: int) -> Fits:
    """Return the fitted validation curve of each recipe over each of AXES. Its draws are the same
    in every run of the report."""
    fits: dict[str, dict[str, Fitted]] = {}
    for plan in evidence.first_plans:
        points = [comparable(shifted_curve(evidence, run)) for run in evidence.seeds(plan.recipe)]
        fits[plan.recipe] = {
            axis: fit_curve(points, axis, num_bootstrap, np.random.default_rng(0)) for axis in AXES
        }
    return fits


def shifted_curve(evidence: Evidence, run: Trained) -> pl.DataFrame:
    """Return the validation curve of a run, with its `seconds`. For recipes that read the profile,
    FLOPs, rollouts and seconds start where profiling ended.

    Seconds are measured for a training as a whole: a point has the share of them that it has of the
    training's executed FLOPs."""
    reads = evidence.plan(run.recipe).reads_profile
    profiled = round(evidence.profile_flops["rollouts"]["profile"]) if reads else 0
    spent = seconds(evidence, run)
    trained = sum(run.flops["executed"][part] for part in PARTS)
    rate = spent["train"] / trained if trained else 0.0
    return run.curve.with_columns(
        (pl.col("flops_executed") * rate + spent["profile"]).alias("seconds"),
        pl.col("rollouts") + profiled,
        *(pl.col(f"flops_{name}") + bill(evidence, run, name)["profile"] for name in COMPARED),
    )


def curve_table(evidence: Evidence) -> pl.DataFrame:
    """Return all validation curves in one table."""
    return pl.concat(
        shifted_curve(evidence, run).select(
            pl.lit(run.recipe).alias("recipe"),
            pl.lit(run.seed).alias("seed"),
            pl.lit(run.name).alias("run"),
            pl.all(),
        )
        for run in evidence.trained
    )


def summarise(
    evidence: Evidence, rows: Sequence[Row], paired: Paired, fits: Fits
) -> dict[str, Any]:
    """Return the summary: the `headline`; `recipes` with mean, min and max over the seeds,
    `differences`, and the compute until the accuracy that the reference ends with (`target`);
    `candidate`, `champion` and `why`; and the metrics of the initial policy."""
    reference = reference_of(evidence)
    recipes = {
        plan.recipe: summary_of(evidence, plan.recipe, rows) for plan in evidence.first_plans
    }
    target = recipes[reference]["validation"]["mean"]
    candidate = choose_candidate(rows, recipes)
    champion, why = judge(candidate)
    for recipe, summary in recipes.items():
        summary["differences"] = differences_of(evidence, recipe, reference, champion, paired)
        summary["compute_to_reference"] = {
            account: fits[recipe][account].compute_to(target) for account in COMPARED
        }
    keys = ("pass_at_1", "pass_at_1_low", "pass_at_1_high", "greedy", "num_prompts", "num_samples")
    initial = {key: evidence.baseline[key] for key in keys}
    compared = {"reference": reference, "recipes": recipes}
    return {
        "headline": headline(compared, evidence.budget),
        "initial": initial,
        "target": target,
        **compared,
        "candidate": {key: candidate[key] for key in ("recipe", "seed")},
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
    }


def reference_of(evidence: Evidence) -> str:
    """Return the recipe that all others are compared with: BASELINE, or the first one."""
    recipes = [plan.recipe for plan in evidence.first_plans]
    return BASELINE if BASELINE in recipes else recipes[0]


def differences_of(
    evidence: Evidence,
    recipe: str,
    reference: str,
    champion: Mapping[str, Any] | None,
    paired: Paired,
) -> dict[str, Difference | None]:
    """Return the paired differences of a recipe, over all its seeds, from the reference (seed by
    seed), from the champion and from the initial policy. None where it would be compared with
    itself, and where there is no champion."""
    mine = [run.name for run in evidence.seeds(recipe)]
    others = {
        "reference": None if recipe == reference else [r.name for r in evidence.seeds(reference)],
        "champion": None
        if champion is None or recipe == champion["recipe"]
        else [f"{champion['recipe']}/{champion['seed']}"],
        "initial": [INITIAL],
    }
    return {
        name: None if other is None else compare(paired, mine, other)
        for name, other in others.items()
    }


def spread(rows: Sequence[Row], value: Callable[[Row], float]) -> dict[str, float]:
    """Return mean, smallest and largest value over the seeds."""
    values = [float(value(row)) for row in rows]
    return {"mean": float(np.mean(values)), "min": min(values), "max": max(values)}


def choose_candidate(rows: Sequence[Row], recipes: Mapping[str, Row]) -> Row:
    """Return the policy that validation chooses: of the recipe with the best mean the best seed."""
    recipe = min(
        recipes,
        key=lambda r: (-recipes[r]["validation"]["mean"], recipes[r][CHEAPER]["mean"]),
    )
    return max(
        (row for row in rows if row["recipe"] == recipe),
        key=lambda r: (r["validation"], -r["seed"]),
    )


def judge(row: Row) -> tuple[dict[str, Any] | None, str]:
    """Return the candidate as the policy to keep, or None, and the reason in words.

    Only this one policy, chosen by validation, is compared with the initial policy on test:
    choosing by test accuracy would bias that accuracy upwards. It is kept if the interval of the
    paired difference is above 0."""
    over = row["over_initial"]
    chosen = (
        f"{row['recipe']}/{row['seed']} has the best validation accuracy "
        f"({row['validation']:.1%}); on test it reaches {row['pass_at_1']:.1%} pass@1, "
        f"{100 * over['mean']:+.1f} points against the initial policy (paired over "
        f"{over['num_prompts']} prompts, 95 % interval "
        f"{100 * over['low']:+.1f} to {100 * over['high']:+.1f})"
    )
    if over["low"] > 0:
        kept = {
            key: row[key] for key in ("recipe", "seed", "validation", "pass_at_1", "over_initial")
        }
        return kept, chosen
    return None, f"{chosen}: not shown to be above it, so no champion"
