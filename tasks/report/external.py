"""What other trainers did with this root's prompts: the rollouts that `winnow import` read, and the
checkpoints that it evaluated.

An import is no stage, and may follow a finished report. So the report does not depend on it: the
page shows the tables in `external.js` beside it, which DVC does not track. The report and every
import write that file."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import polars as pl

from tasks.common.artifacts import IMPORTED, Layout
from tasks.common.checksums import read_checked
from tasks.common.files import digest_file, write_text
from tasks.common.statistics import bootstrap_interval, score_prompts
from tasks.models.provenance import metrics_of
from tasks.report.evidence import ANSWERS, read_scores
from tasks.report.paired import INITIAL, Paired, difference, rates_of
from tasks.report.views.tables import difference_words

ROLLOUTS = (
    *("name", "trainer", "rollouts", "prompts", "steps", "accuracy", "95 % interval"),
    *("scored otherwise", "tokens"),
)
ROLLOUTS_WORDS = (
    "Rollouts that other trainers sampled, graded here; winnow read shows them by their name. "
    "Accuracy is the mean of the prompts' pass rates over all imported steps, its interval is over "
    "prompts. Scored otherwise: rollouts whose verdict here differs from the trainer's score, of "
    "those with a score. Tokens are counted from the texts, prompts included."
)
CHECKPOINTS = (
    *("name", "policy", "pass@1", "95 % interval", "greedy"),
    *("over the initial policy", "tokens sampled"),
)
CHECKPOINTS_WORDS = (
    "Policies that other trainers trained, evaluated like the recipes on the test prompts; winnow "
    "read shows their answers by name/eval. The difference from the initial policy is in points, "
    "paired by prompt. A dash: the initial policy was evaluated again since, so import the "
    "checkpoint again. Tokens are of the imported rollouts of the same name; the trainer may have "
    "sampled more, and its compute is unknown."
)


def write_external(layout: Layout, num_bootstrap: int) -> None:
    """Write `external.js` from all imports. Raise ArtifactError for a damaged one."""
    tables = []
    for file, headers, words, cells_of in (
        ("checkpoint.json", CHECKPOINTS, CHECKPOINTS_WORDS, checkpoint_cells),
        ("summary.json", ROLLOUTS, ROLLOUTS_WORDS, rollouts_cells),
    ):
        names = sorted(path.parent.name for path in layout.root.glob(f"external/*/{file}"))
        rows = [cells_of(layout, name, num_bootstrap) for name in names]
        tables += [{"caption": words, "cells": [headers, *rows]}] if rows else []
    write_text(layout.report / "external.js", f"var imported = {json.dumps(tables, indent=1)};\n")


def checkpoint_cells(layout: Layout, name: str, num_bootstrap: int) -> Sequence[str]:
    """Return the cells of one checkpoint, in the order of CHECKPOINTS."""
    folder, own = layout.external(name), f"external/{name}"
    note = folder / "checkpoint.json"
    noted, metrics = read_checked(note), metrics_of(note, folder / "eval")
    over, before = None, layout.baseline / "rollouts.parquet"
    if before.exists() and digest_file(before) == noted["baseline"]:
        rates = rates_of(read_scores(folder / "eval"), own)
        rates = rates.join(rates_of(read_scores(layout.baseline), INITIAL), on="prompt_id")
        over = difference(Paired(rates, num_bootstrap), [own], [INITIAL])
    low, high = metrics["pass_at_1_low"], metrics["pass_at_1_high"]
    return [
        own,
        noted["digest"][:8],
        f"{metrics['pass_at_1']:.1%}",
        f"{low:.1%} to {high:.1%}",
        f"{metrics['greedy']:.1%}",
        difference_words(over),
        f"{num_tokens(folder):,}" if (folder / "summary.json").exists() else "unknown",
    ]


def rollouts_cells(layout: Layout, name: str, num_bootstrap: int) -> Sequence[str]:
    """Return the cells of one import, in the order of ROLLOUTS."""
    folder = layout.external(name)
    noted = read_checked(folder / "summary.json")
    rows = IMPORTED.read_columns(folder / "rollouts.parquet", ANSWERS)
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
        f"{noted['num_differing']:,} of {noted['num_scored']:,}" if noted["num_scored"] else "–",
        f"{num_tokens(folder):,}",
    ]


def num_tokens(folder: Path) -> int:
    """Return the number of tokens of the imported rollouts in `folder`, prompts included."""
    counts = ("prompt_tokens", "completion_tokens")
    rows = IMPORTED.read_columns(folder / "rollouts.parquet", counts)
    return int(rows.select(pl.all().cast(pl.Int64).sum()).sum_horizontal().item())
