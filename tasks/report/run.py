"""The stage `report`: what all recipes and seeds reached and cost, side by side."""

import logging

from tasks.common.files import digest_file, write_json, write_text
from tasks.common.params import Experiment
from tasks.common.sealed import write_sealed
from tasks.common.stage import Stage
from tasks.report import rounds
from tasks.report.answers import shown_runs, write_rollouts
from tasks.report.drift import Drift, drift_of, groups_of
from tasks.report.evidence import Evidence, read_evidence
from tasks.report.leaderboard import curve_table, fit_curves, leaderboard, summarise
from tasks.report.metrics import write_metrics
from tasks.report.origin import origin_of
from tasks.report.page import page
from tasks.report.paired import pair
from tasks.report.plots import plots
from tasks.report.record import record
from tasks.report.settings import ReportSettings
from tasks.report.tables import text_table
from tasks.report.words import stale_words

logger = logging.getLogger(__name__)


def main(stage: Stage) -> None:
    """Read everything, write the report, print the leaderboard, and record the champion."""
    evidence = read_evidence(stage.layout, stage.section("experiment", Experiment))
    settings = stage.section("report", ReportSettings)
    out = stage.layout.report
    paired = pair(evidence, settings.num_bootstrap)
    rows = leaderboard(evidence, paired)
    curves = curve_table(evidence)
    fits = fit_curves(evidence, settings.num_bootstrap)
    drifts = measure(evidence, settings)
    summary = {**summarise(evidence, rows, paired, fits), "drift": drifts}
    side_by_side = rounds.read_rounds(stage.options.before, evidence, rows, summary)
    if side_by_side:
        summary["rounds"] = rounds.summary_of(side_by_side)
    table = f"{summary['headline']}\n\n{text_table(rows, summary)}"
    write_json(out / "leaderboard.json", rows)
    checksums = {"leaderboard.json": digest_file(out / "leaderboard.json")}
    write_sealed(out / "summary.json", {**summary, "digests": checksums})
    write_text(out / "leaderboard.txt", f"{table}{summary['why']}\n")
    write_text(out / "curve.csv", curves.write_csv())
    runs = shown_runs(rows, summary["champion"])
    path = out / "rollouts.parquet"
    rollouts = write_rollouts(path, stage.layout, evidence, paired, runs)
    origin = origin_of(stage.layout)
    html = page(evidence, rows, summary, curves, fits, paired, rollouts, origin, side_by_side)
    write_text(out / "index.html", html)
    write_metrics(out / "metrics", rows)
    for account, picture in plots(evidence, curves, fits).items():
        write_text(out / "plots" / f"{account}.svg", picture)
    record(stage, evidence, rows, summary)
    print(f"\n{table}{summary['why']}\n")


def measure(evidence: Evidence, settings: ReportSettings) -> dict[str, Drift]:
    """Return the drift of every run by its name. A stale profile is a warning if groups were sized
    by it."""
    drifts: dict[str, Drift] = {}
    for trained in evidence.trained:
        groups = groups_of(trained.steps, trained.rollouts, evidence.profile)
        drift = drift_of(groups, settings.stale_above)
        drifts[trained.name] = drift
        if drift["stale"]:
            reads = evidence.plan(trained.recipe).reads_profile
            words = stale_words(trained.name, drift, reads_profile=reads)
            logger.log(logging.WARNING if reads else logging.INFO, "%s", words)
    return drifts
