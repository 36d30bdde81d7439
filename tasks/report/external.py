"""What other trainers did with this root's prompts: the rollouts that `winnow import` read.

An import is no stage, and may follow a finished report. So the report does not depend on it: the
page shows the tables in `external.js` beside it, which DVC does not track. The report and every
import write that file."""

import json
from collections.abc import Sequence

import numpy as np
import polars as pl

from tasks.common.artifacts import IMPORTED, Layout
from tasks.common.checksums import read_checked
from tasks.common.files import write_text
from tasks.common.statistics import bootstrap_interval, score_prompts
from tasks.report.paired import rates_of

ROLLOUTS = (
    *("name", "trainer", "rollouts", "prompts", "steps", "accuracy", "95 % interval"),
    *("scored otherwise", "tokens"),
)
ROLLOUTS_WORDS = (
    "Rollouts that other trainers sampled, graded here; winnow read shows them by their name. "
    "Accuracy is the mean of the prompts' pass rates over all imported steps, its interval is over "
    "prompts. Scored otherwise: rollouts whose verdict here differs from the trainer's score, of "
    "those with a score. Tokens include the prompts."
)


def write_external(layout: Layout, num_bootstrap: int) -> None:
    """Write `external.js` from all imports. Raise ArtifactError for a damaged one."""
    names = sorted(path.parent.name for path in layout.root.glob("external/*/summary.json"))
    rows = [rollouts_cells(layout, name, num_bootstrap) for name in names]
    tables = [{"caption": ROLLOUTS_WORDS, "cells": [ROLLOUTS, *rows]}] if rows else []
    write_text(layout.report / "external.js", f"var imported = {json.dumps(tables, indent=1)};\n")


def rollouts_cells(layout: Layout, name: str, num_bootstrap: int) -> Sequence[str]:
    """Return the cells of one import, in the order of ROLLOUTS."""
    folder = layout.external(name)
    noted = read_checked(folder / "summary.json")
    columns = ("prompt_id", "greedy", "outcome", "prompt_tokens", "completion_tokens")
    rows = IMPORTED.read_columns(folder / "rollouts.parquet", columns)
    rates = rates_of(score_prompts(rows), name)[name].drop_nulls().to_numpy()
    accuracy = ["–", "–"]  # nothing could be graded
    if len(rates):
        low, high = bootstrap_interval(rates, num_bootstrap, np.random.default_rng(0))
        accuracy = [f"{rates.mean():.1%}", f"{low:.1%} to {high:.1%}"]
    return [
        f"external/{name}",
        noted["from"],
        *(f"{noted[f'num_{what}']:,}" for what in ROLLOUTS[2:5]),
        *accuracy,
        f"{noted['num_differing']:,} of {noted['num_scored']:,}",
        f"{num_tokens(rows):,}",
    ]


def num_tokens(rows: pl.DataFrame) -> int:
    """Return the number of tokens of imported rollouts, prompts included."""
    tokens = rows.select(pl.col("prompt_tokens", "completion_tokens").cast(pl.Int64).sum())
    return int(tokens.sum_horizontal().item())
