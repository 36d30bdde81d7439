"""The record in MLflow: the experiment, all data of each recipe and seed, and the aliases of the
candidate and the champion."""

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import polars as pl

from tasks.common import recipes
from tasks.common.params import Experiment
from tasks.common.stage import Stage
from tasks.common.tracking.journal import Event, milliseconds, point
from tasks.common.tracking.pipelines import axis_of
from tasks.report.curves import COMPARED
from tasks.report.evidence import Trained
from tasks.report.measured import all_measured, total_seconds
from tasks.report.results import SUMMARISED, Results, Row, name_of

logger = logging.getLogger(__name__)

# without the parquet of all rollouts, which is as large as the stages' own outputs
RECORDED = (
    *("index.html", "leaderboard.json", "leaderboard.txt"),
    *("summary.json", "curve.csv", "measured.js", "external.js"),
)
# of a cell; the pipeline's run has those of the candidate
SHOWN = ("pass_at_1", "flops_executed", "flops_charged", "seconds")


def record(stage: Stage, results: Results) -> None:
    """Record the experiment, its cells, the report's files, and the aliases in MLflow. A failure
    here is only logged."""
    try:
        write(stage, results)
    except Exception as error:
        logger.warning("the report is only partly recorded (%s: %s)", type(error).__name__, error)


def write(stage: Stage, results: Results) -> None:
    tracker, layout, summary = stage.tracker, stage.layout, results.summary
    by_name = {name_of(row): row for row in results.rows}
    measured = all_measured(layout, results.evidence)
    prompts = {split: layout.prompts(split) for split in ("train", "validation", "test")}
    trained = results.evidence.trained
    cells = {
        run.name: cell_metrics(by_name[run.name]) | {"seconds": total_seconds(measured, run)}
        for run in trained
    }
    candidate = cells[name_of(summary["candidate"])]
    tracker.experiment(
        experiment_params(stage),
        experiment_metrics(summary) | {name: candidate[name] for name in SHOWN},
        summary["headline"],
    )
    for run in trained:
        tracker.cell(
            run.recipe,
            run.seed,
            run.settings,
            [point(cells[run.name], milliseconds()), *curves(stage, results, run)],
            datasets={split: path for split, path in prompts.items() if path.exists()},
            outputs=outputs(stage, run),
        )
    for name in RECORDED:
        tracker.artifact(layout.report / name)
    tracker.champion(
        trained_by(stage, summary["champion"]),
        f"{summary['headline']} {summary['why']}",
        trained_by(stage, summary["candidate"]),
    )


def trained_by(stage: Stage, cell: Mapping[str, Any] | None) -> Path | None:
    """Return the file that identifies the policy of the chosen cell, or None. Two trainings can
    have the same curve and different weights."""
    return stage.layout.trained_card(cell["recipe"], cell["seed"]) if cell else None


def outputs(stage: Stage, run: Trained) -> list[Path]:
    """Return the files that identify the plan, training and evaluation of a cell."""
    layout, cell = stage.layout, (run.recipe, run.seed)
    return [
        layout.plan(*cell) / "plan.parquet",
        layout.trained_card(*cell),
        layout.train(*cell) / "curve.parquet",
        layout.train(*cell) / "flops.json",
        layout.evaluation(*cell) / "metrics.json",
    ]


def experiment_params(stage: Stage) -> dict[str, Any]:
    """Return all parameters but `tracking`, with the experiment's recipes resolved."""
    names = stage.section("experiment", Experiment).recipes
    named = {name: recipes.resolved(stage.params, name) for name in names}
    return {**{k: v for k, v in stage.params.items() if k != "tracking"}, "recipes": named}


def experiment_metrics(summary: Mapping[str, Any]) -> dict[str, float]:
    """Return means over seeds as `pass_at_1/RECIPE`, and the initial policy's as `.../initial`."""
    means = {
        f"{name}/{recipe}": values[name]["mean"]
        for recipe, values in summary["recipes"].items()
        for name in SUMMARISED
        if name in values
    }
    initial = {f"{name}/initial": summary["initial"][name] for name in ("pass_at_1", "greedy")}
    return {**means, **initial}


def cell_metrics(row: Row) -> dict[str, float | None]:
    """Return the results and costs of a cell, and its pass@1 per TFLOP, for MLflow."""
    bills = {account: row[f"flops_{account}"] for account in COMPARED}
    totals = {account: bill["total"] for account, bill in bills.items() if bill}
    names = ("pass_at_1", "pass_at_1_low", "pass_at_1_high", "greedy", "validation")
    per_tflop = {
        f"pass_at_1_per_tflop_{account}": row["pass_at_1"] / (total / 1e12)
        for account, total in totals.items()
        if total
    }
    return {
        **{name: row[name] for name in (*names, "steps", "rollouts", "tokens")},
        **{f"validation_at_{share}": value for share, value in row["validation_at"].items()},
        "pass_at_1_over_initial": row["over_initial"]["mean"],
        **{f"flops_{account}": total for account, total in totals.items()},
        **per_tflop,
    }


def curves(stage: Stage, results: Results, run: Trained) -> list[Event]:
    """Return the validation curve and the mean reward, over steps and over FLOPs as `axis_of` has
    them, and other metrics of each training step. Training has recorded the first two under the
    same names. Timestamps are the file's mtime, so recording again gives the same points."""
    account, profile = axis_of(stage.layout, run.recipe, run.seed)
    spent = f"flops_{account}"
    file = stage.layout.train(run.recipe, run.seed) / "curve.parquet"
    when = int(file.stat().st_mtime * 1000)
    trunk = results.curves.filter(pl.col("run") == run.name, pl.col("branch").is_null())
    accuracy = ("accuracy", "accuracy_low", "accuracy_high")
    validated = trunk.select("step", spent, pl.col(*accuracy).name.prefix("validation_"))
    rewarded = run.steps.select("step", pl.col(spent) + profile, "reward_mean")
    mixed = (pl.col("num_mixed_groups") / pl.col("num_prompts")).alias("mixed_rate")
    seen = run.steps.select("step", mixed, "loss", "entropy", "kl")
    points = []
    for row in (row for table in (validated, rewarded, seen) for row in table.to_dicts()):
        step, flops = row.pop("step"), row.pop(spent, None)
        points.append(point(row, when, step, flops))
    return points
