"""The stage `report`: results and costs of all recipes and seeds, side by side."""

import logging
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from tasks.common.checksums import write_checked
from tasks.common.files import digest_file, rounded, write_json, write_text
from tasks.common.params import Experiment
from tasks.common.processes.ending import PARENT
from tasks.common.stage import Stage
from tasks.report.answers import shown_runs, write_rollouts
from tasks.report.curves import COMPARED
from tasks.report.evidence import read_evidence
from tasks.report.external import write_external
from tasks.report.measured import measured_script
from tasks.report.results import Row, results_of, stale_runs
from tasks.report.settings import ReportSettings
from tasks.report.views.page import page
from tasks.report.views.plots import plots
from tasks.report.views.record import record
from tasks.report.views.tables import text_table

logger = logging.getLogger(__name__)

NO_ROLLOUTS = {"runs": [], "changes": [], "total": 0, "prompts": []}


def main(stage: Stage) -> None:
    """Read everything, write and record the report; print the leaderboard unless in a flow."""
    experiment, ended = stage.section("experiment", Experiment), stage.options.cells
    evidence = read_evidence(stage.layout, experiment, ended)
    settings = stage.section("report", ReportSettings)
    results = results_of(evidence, settings)
    summary, out = results.summary, stage.layout.report
    write_text(out / "measured.js", measured_script(stage.layout, results))
    write_external(stage.layout, settings.num_bootstrap)
    if ended:  # the page alone, of an unfinished experiment
        write_text(out / "index.html", page(results, NO_ROLLOUTS))
        return
    for run, words in stale_runs(results):  # warn if groups were sized by the profile
        logger.log(logging.WARNING if run.reads_profile else logging.INFO, "%s", words)
    table = f"{summary['headline']}\n\n{text_table(results)}{summary['why']}\n"
    write_json(out / "leaderboard.json", rounded(results.rows))
    digests = {"digests": {"leaderboard.json": digest_file(out / "leaderboard.json")}}
    write_checked(out / "summary.json", rounded({**summary, **digests}))
    write_text(out / "leaderboard.txt", table)
    write_text(out / "curve.csv", results.curves.write_csv())
    shown = shown_runs(results.rows, summary["champion"])
    rollouts = write_rollouts(out / "rollouts.parquet", stage.layout, results, shown)
    write_text(out / "index.html", page(results, rollouts))
    write_metrics(out / "metrics", results.rows)
    for account, picture in plots(results).items():
        write_text(out / "plots" / f"{account}.svg", picture)
    record(stage, results)
    if PARENT not in os.environ:  # a flow prints it at its end
        print(f"\n{table}")


def write_metrics(folder: Path, rows: Sequence[Row]) -> None:
    """Write the numbers that `dvc metrics` compares: one small file for each recipe and seed, which
    DVC shows as rows of one table. Files of other cells are removed. All files are in git and
    therefore in every clone.

        metrics/sgpo/0.json    {"recipe": "sgpo", "seed": 0, "pass@1": 0.469, "charged": 34.4}

    `val` is the validation accuracy, `val@0.25` that of the branch ending at a quarter of the run.
    FLOPs are in GFLOPs, to five significant digits, as DVC prints numbers below 1e16 in full."""
    shutil.rmtree(folder, ignore_errors=True)
    for row in rows:
        metrics = {
            "recipe": row["recipe"],
            "seed": row["seed"],
            "pass@1": round(row["pass_at_1"], 4),
            "greedy": round(row["greedy"], 4),
            "val": round(row["validation"], 4),
        }
        for share, accuracy in row["validation_at"].items():
            metrics[f"val@{share}"] = round(accuracy, 4)
        for account in COMPARED:
            if spent := row[f"flops_{account}"]:  # else it is unknown
                metrics[account] = float(f"{spent['total'] / 1e9:.5g}")
        write_json(folder / row["recipe"] / f"{row['seed']}.json", metrics)
