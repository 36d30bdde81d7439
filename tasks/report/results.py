"""The results of the report, computed once: a row for each recipe and seed, a summary for each
recipe, the fitted curves, and the champion. Every table, chart, file and record of `views` shows
some of them. Policies are compared by the paired differences of `paired`.

Profiling is added to a recipe's bill if and only if the recipe reads the profile. Validation during
training and the evaluation on test are measurements, the same for all recipes. Their FLOPs are in
no total. Seconds and work lost to kills differ between equal runs: see `measured`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import polars as pl

from tasks.common.accounting.ledger import ACCOUNTS
from tasks.report.curves import COMPARED, Fits, comparable, fit_curve
from tasks.report.drift import drift_of, groups_of, stale_words
from tasks.report.evidence import Evidence, Trained
from tasks.report.headline import CHEAPER, best_on_validation, headline
from tasks.report.paired import INITIAL, Difference, Paired, difference, pair, points_words
from tasks.report.points import budget_account, points_of
from tasks.report.settings import ReportSettings

Row = dict[str, Any]
BASELINE = "grpo"  # the recipe that others are compared with, if it is in the experiment
# the parts of the bill in every account
PARTS = ("profile", "generate", "score", "update")
# the values of a row to summarise over the seeds
SUMMARISED = (
    *("pass_at_1", "greedy", "validation", "rollouts", "tokens"),
    *(f"flops_{account}" for account in ACCOUNTS),
)


@dataclass(frozen=True)
class Results:
    """Everything that the report shows. `rows` is the leaderboard; `curves` has the validation
    curves of all runs; `groups` has each run's groups with the profile's prediction (`drift`)."""

    evidence: Evidence
    paired: Paired
    rows: Sequence[Row]
    curves: pl.DataFrame
    fits: Fits
    groups: Mapping[str, pl.DataFrame]
    summary: Mapping[str, Any]

    @property
    def tested(self) -> dict[str, dict[str, float]]:
        """Test pass@1 and its 95 % interval, of the initial policy and of every recipe."""
        initial, ends = self.summary["initial"], ("low", "high")
        found = {"initial": {**initial, "pass_at_1": {"mean": initial["pass_at_1"]}}}
        return {
            name: {
                "mean": one["pass_at_1"]["mean"],
                **{end: one[f"pass_at_1_{end}"] for end in ends},
            }
            for name, one in {**found, **self.summary["recipes"]}.items()
        }

    @property
    def colours(self) -> dict[str, int]:
        """A colour index per recipe, for all figures."""
        return {run.recipe: index for index, run in enumerate(self.evidence.first_runs)}


def results_of(evidence: Evidence, settings: ReportSettings) -> Results:
    """Compute all results. Equal input files lead to equal results."""
    paired = pair(evidence, settings.num_bootstrap)
    rows = leaderboard(evidence, paired)
    curves = curve_table(evidence)
    fits = fit_curves(curves, evidence.axes, settings.num_bootstrap)
    groups = {
        run.name: groups_of(run.steps, run.rollouts, evidence.profile) for run in evidence.trained
    }
    drifts = {name: drift_of(found, settings.stale_above) for name, found in groups.items()}
    points = points_of(curves, fits, reference_of(evidence), evidence.budget, axis_of(evidence))
    summary = {**summarise(evidence, rows, paired, points), "drift": drifts}
    return Results(evidence, paired, rows, curves, fits, groups, summary)


def name_of(cell: Mapping[str, Any]) -> str:
    """Return the name of a run: `recipe/seed`."""
    return f"{cell['recipe']}/{cell['seed']}"


def stale_runs(results: Results) -> list[tuple[Trained, str]]:
    """Return each run whose profile is stale, and a sentence on the consequence."""
    drifts = results.summary["drift"]
    return [
        (run, stale_words(run.name, drifts[run.name], reads_profile=run.reads_profile))
        for run in results.evidence.trained
        if drifts[run.name]["stale"]
    ]


def leaderboard(evidence: Evidence, paired: Paired) -> list[Row]:
    """Return a row per recipe and seed: the best test pass@1 first, ties by the cost CHEAPER."""
    rows = [row_of(evidence, run, paired) for run in evidence.trained]
    return sorted(
        rows, key=lambda r: (-r["pass_at_1"], r[CHEAPER]["total"], r["recipe"], r["seed"])
    )


def row_of(evidence: Evidence, run: Trained, paired: Paired) -> Row:
    reads = run.reads_profile
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
        "over_initial": difference(paired, [run.name], [INITIAL]),
        "validation": run.curve["accuracy"][-1],
        "validation_at": {
            f"{share:g}": accuracy
            for share, accuracy in run.curve.drop_nulls("branch")["branch", "accuracy"].iter_rows()
        },
        "steps": len(run.steps),
        "rollouts": round(run.flops["rollouts"]["generate"]),
        "tokens": round(run.flops["tokens"]["generate"]),
        "rollouts_profile": round(evidence.profile_flops["rollouts"]["profile"]) if reads else 0,
        "tokens_profile": round(evidence.profile_flops["tokens"]["profile"]) if reads else 0,
        **bills,
        "flops_validation": (run.flops["executed"] or {}).get("evaluate"),
        "flops_branches": (run.flops["executed"] or {}).get("branch"),
        "not_charged": run.flops.get("not_charged", []),
    }


def bill(evidence: Evidence, run: Trained, account: str) -> dict[str, float] | None:
    """Return a run's FLOPs by part in one account, and their `total`, without validation; None if
    they are unknown."""
    if run.flops[account] is None:
        return None
    parts = {part: float(run.flops[account][part]) for part in PARTS}
    parts["profile"] = profile_cost(evidence, run, account)
    return {**parts, "total": sum(parts.values())}


def profile_cost(evidence: Evidence, run: Trained, account: str) -> float:
    """Return the FLOPs of the profile in one account, 0 if the recipe does not read it."""
    return float(evidence.profile_flops[account]["profile"]) if run.reads_profile else 0.0


def axis_of(evidence: Evidence) -> str:
    """Return the account for equal compute (see `budget_account`); if it is unknown for a run, the
    charged one."""
    account = budget_account(evidence.budget)
    return account if account in evidence.axes else "charged"


def curve_table(evidence: Evidence) -> pl.DataFrame:
    """Return the validation curves of all runs in one table. For recipes that read the profile,
    FLOPs and rollouts start at the cost of the profile."""
    profiled = round(evidence.profile_flops["rollouts"]["profile"])
    return pl.concat(
        run.curve.select(
            pl.lit(run.recipe).alias("recipe"),
            pl.lit(run.seed).alias("seed"),
            pl.lit(run.name).alias("run"),
            pl.all(),
        ).with_columns(
            pl.col("rollouts") + (profiled if run.reads_profile else 0),
            *(pl.col(f"flops_{name}") + profile_cost(evidence, run, name) for name in COMPARED),
        )
        for run in evidence.trained
    )


def fit_curves(curves: pl.DataFrame, axes: Sequence[str], num_bootstrap: int) -> Fits:
    """Return the fitted validation curve of each recipe over each axis. The draws are the same in
    every run of the report."""
    recipes = curves.partition_by("recipe", maintain_order=True)
    fits = {}
    for recipe in recipes:
        points = [comparable(run) for run in recipe.partition_by("run", maintain_order=True)]
        fits[str(recipe["recipe"][0])] = {
            axis: fit_curve(points, axis, num_bootstrap, np.random.default_rng(0)) for axis in axes
        }
    return fits


def summarise(
    evidence: Evidence, rows: Sequence[Row], paired: Paired, points: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the summary: the `headline`; `recipes` (mean, min and max over the seeds, and
    `differences`); `points` at equal compute; `reference`, `candidate`, `champion` and `why`; the
    digests of the runs' `policies`; and the metrics of the `initial` policy."""
    reference = reference_of(evidence)
    recipes = {run.recipe: summary_of(run, rows) for run in evidence.first_runs}
    best = best_on_validation(recipes, list(recipes))
    candidate = best_seed(rows, best[0])
    champion, why = judge(candidate, choice_words(candidate, rows, recipes[best[0]], best[1:]))
    if evidence.unranked:
        champion, why = None, "recipes are not ranked"
    for recipe, summary in recipes.items():
        summary["differences"] = differences_of(evidence, recipe, reference, champion, paired)
    keys = ("pass_at_1", "pass_at_1_low", "pass_at_1_high", "greedy", "num_prompts", "num_samples")
    initial = {key: evidence.baseline[key] for key in keys}
    compared = {"reference": reference, "recipes": recipes, "points": points}
    return {
        "headline": evidence.unranked or headline(compared, evidence.budget),
        "initial": initial,
        "policies": {run.name: run.metrics["policy"] for run in evidence.trained},
        **compared,
        "candidate": {key: candidate[key] for key in ("recipe", "seed")},
        "champion": champion,
        "why": why,
    }


def summary_of(first: Trained, rows: Sequence[Row]) -> Row:
    mine = [row for row in rows if row["recipe"] == first.recipe]
    return {
        "num_seeds": len(mine),
        "reads_profile": first.reads_profile,
        **{
            name: spread(mine, name)
            for name in SUMMARISED
            if None not in [row[name] for row in mine]
        },
        "pass_at_1_low": min(row["pass_at_1_low"] for row in mine),
        "pass_at_1_high": max(row["pass_at_1_high"] for row in mine),
    }


def reference_of(evidence: Evidence) -> str:
    """Return the recipe with which all others are compared: BASELINE, or the first one."""
    recipes = [run.recipe for run in evidence.first_runs]
    return BASELINE if BASELINE in recipes else recipes[0]


def differences_of(
    evidence: Evidence,
    recipe: str,
    reference: str,
    champion: Mapping[str, Any] | None,
    paired: Paired,
) -> dict[str, Difference | None]:
    """Return the paired differences of a recipe, over all its seeds, from the reference (seed by
    seed), from the champion and from the initial policy. A value is None for a comparison of a
    recipe with itself, if seeds are missing, and if there is no champion."""
    runs, beside = evidence.seeds(recipe), evidence.seeds(reference)
    mine, are_paired = [r.name for r in runs], [r.seed for r in runs] == [r.seed for r in beside]
    others = {
        "reference": [r.name for r in beside] if recipe != reference and are_paired else None,
        "champion": [name_of(champion)] if champion and recipe != champion["recipe"] else None,
        "initial": [INITIAL],
    }
    return {
        name: None if other is None else difference(paired, mine, other)
        for name, other in others.items()
    }


def spread(rows: Sequence[Row], name: str) -> dict[str, float]:
    """Return the mean, minimum and maximum, over the rows, of a value or of a cost's total."""
    found = [row[name] for row in rows]
    values = [float(value["total"] if isinstance(value, dict) else value) for value in found]
    return {"mean": float(np.mean(values)), "min": min(values), "max": max(values)}


def best_seed(rows: Sequence[Row], recipe: str) -> Row:
    """Return the run of a recipe with the best validation accuracy; among equals, the lowest
    seed."""
    mine = (row for row in rows if row["recipe"] == recipe)
    return max(mine, key=lambda row: (row["validation"], -row["seed"]))


def choice_words(row: Row, rows: Sequence[Row], summary: Row, tied: Sequence[str]) -> str:
    """Return why validation chooses the candidate `row`: the best seed of the recipe with the best
    mean (`summary`), and the rule between it and equal recipes (`tied`) or seeds."""
    name, best = name_of(row), row["validation"]
    words = f"{name} has the best validation accuracy ({best:.1%})"
    if (num_seeds := summary["num_seeds"]) > 1:
        equal = sum(one["recipe"] == row["recipe"] and one["validation"] == best for one in rows)
        words = (
            f"{row['recipe']} has the best validation accuracy ({summary['validation']['mean']:.1%}"
            f", the mean of {num_seeds} seeds), {name} the best of its seeds ({best:.1%}"
            f"{'; of equal seeds the lowest' if equal > 1 else ''})"
        )
    if tied:
        words += f", tied with {', '.join(tied)}; of equals the cheapest in charged_mixed is chosen"
    return words


def judge(row: Row, choice: str) -> tuple[dict[str, Any] | None, str]:
    """Return (the candidate `row` if it is to be kept, else None; the reason in words, beginning
    with those for the `choice`).

    Only this one policy, chosen by validation, is compared with the initial policy on test:
    choosing by test accuracy would bias that accuracy upwards. It is kept if the interval of the
    paired difference is above 0."""
    over = row["over_initial"]
    words = (
        f"{choice}; on test {name_of(row)} reaches {row['pass_at_1']:.1%} pass@1, "
        f"{100 * over['mean']:+.1f} points against the initial policy (paired over "
        f"{over['num_prompts']} prompts, 95 % interval {points_words(over)})"
    )
    if over["low"] > 0:
        kept = {
            key: row[key] for key in ("recipe", "seed", "validation", "pass_at_1", "over_initial")
        }
        return kept, words
    return None, f"{words}: not shown to be above it, so no champion"
