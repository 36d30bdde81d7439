"""Put what all recipes and seeds reached and cost side by side: `report/`.

python -m tasks.report --params params.yaml --data data
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tasks.common.artifacts import replace_file, write_json
from tasks.common.params import Experiment
from tasks.common.stage import Stage, run
from tasks.report.evidence import read_evidence
from tasks.report.leaderboard import Row, curve_table, leaderboard, summarise
from tasks.report.page import page
from tasks.report.tables import text_table


def main(stage: Stage) -> None:
    """Read everything, write the report, print the leaderboard, tell the record who is champion."""
    evidence = read_evidence(stage.layout, stage.section("experiment", Experiment))
    rows, curves, out = leaderboard(evidence), curve_table(evidence), stage.layout.report
    summary = summarise(evidence, rows)
    table = text_table(rows)
    write_json(out / "leaderboard.json", rows)
    write_json(out / "summary.json", summary)
    write_text(out / "leaderboard.txt", f"{table}{summary['why']}\n")
    write_text(out / "curve.csv", curves.write_csv())
    write_text(out / "index.html", page(evidence, rows, summary, curves))
    record(stage, rows, summary)
    print(f"\n{table}{summary['why']}\n")


def write_text(path: Path, text: str) -> None:
    replace_file(path, lambda file: file.write(text.encode()))


def record(stage: Stage, rows: Sequence[Row], summary: Mapping[str, Any]) -> None:
    """The leaderboard as metrics, the report as artifacts, the champion as an alias."""
    keys = ("pass_at_1", "greedy", "validation")
    for row in rows:
        values = {f"{key}.{row['recipe']}.{row['seed']}": row[key] for key in keys}
        stage.tracker.metrics(values)
    stage.tracker.artifact(stage.layout.report)
    champion = summary["champion"]
    evidence = stage.layout.train(champion["recipe"], champion["seed"]) / "curve.parquet" if champion else None
    stage.tracker.champion(evidence, summary["why"])


if __name__ == "__main__":
    run("report", main)
