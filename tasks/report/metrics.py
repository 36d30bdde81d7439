"""The numbers that `dvc metrics` compares: one small file for each recipe and seed, so that they
are the rows of one table. They stand in git, and so in every clone.

    report/metrics/sgpo/0.json    {"recipe": "sgpo", "seed": 0, "pass@1": 0.469, "charged": 34.4}

FLOPs are in GFLOPs here: DVC prints every digit of a number below 1e16."""

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tasks.common.files import write_json
from tasks.report.curves import COMPARED
from tasks.report.leaderboard import Row


def metrics_of(row: Row) -> dict[str, Any]:
    """Return what is compared of a row of the leaderboard: accuracies, and compute by account."""
    return {
        "recipe": row["recipe"],
        "seed": row["seed"],
        "pass@1": round(row["pass_at_1"], 4),
        "greedy": round(row["greedy"], 4),
        **{account: gflops(row[f"flops_{account}"]) for account in COMPARED},
    }


def gflops(bill: Mapping[str, float]) -> float:
    """Return a bill's total in GFLOPs, to five digits."""
    return float(f"{bill['total'] / 1e9:.5g}")


def write_metrics(folder: Path, rows: Sequence[Row]) -> None:
    """Write a file for each row, and remove those of cells that are no longer compared."""
    shutil.rmtree(folder, ignore_errors=True)
    for row in rows:
        write_json(folder / row["recipe"] / f"{row['seed']}.json", metrics_of(row))
