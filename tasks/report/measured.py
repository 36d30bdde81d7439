"""Values that differ between equal runs: seconds, work lost to kills, time and machine of the
report.

They are written to `measured.js` beside the page, which loads it. DVC does not track that file, so
equal runs have equal outputs. A cell that was restored or pulled has no measurements here."""

import json
import os
import platform
from collections.abc import Mapping
from datetime import UTC, datetime

from tasks.common.artifacts import Layout
from tasks.common.checksums import read_note_of
from tasks.common.tracking.pipelines import git_tags, this_host
from tasks.report.evidence import Evidence, Json, Trained
from tasks.report.results import Results, name_of


def measured_script(layout: Layout, results: Results) -> str:
    """Return `measured.js`: time, commit and machine, and what was measured of the profile and of
    each cell, with its seconds and sampled tokens a second as the page shows them."""
    when = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    machine = f"{this_host()}, {os.cpu_count()} cores, {platform.system()} {platform.machine()}"
    measured, rows = all_measured(layout, results.evidence), {name_of(r): r for r in results.rows}
    cells = {}
    for run in results.evidence.trained:
        seconds, row = total_seconds(measured, run), rows[run.name]
        tokens = row["tokens"] + row["tokens_profile"]
        shown = [f"{seconds:,.0f}", f"{tokens / seconds:,.0f}"] if seconds else []
        cells[key_of(run)] = {"shown": shown, **measured[run.name]}
    made = f"{when} from {git_tags().get('git', 'no git repository')} on {machine}"
    found = {"made": made, "profile": measured["profile"], "cells": cells}
    return f"var measured = {json.dumps(found, indent=1)};\n"


def key_of(run: Trained) -> str:
    """Return the key of a cell in `measured.js`: a page of other weights shows none of it."""
    return f"{run.name} {run.metrics['policy']}"


def all_measured(layout: Layout, evidence: Evidence) -> dict[str, Json]:
    """Return the measurements of the profile and of every training run, by name. They are empty if
    the note is missing or belongs to another run."""
    of = {"profile": ("profile", layout.profile / "profile.parquet")}
    for run in evidence.trained:
        path = layout.train(run.recipe, run.seed) / "curve.parquet"
        of[run.name] = (f"{run.recipe}-{run.seed}", path)
    return {name: read_note_of(layout.measured(note), file) for name, (note, file) in of.items()}


def total_seconds(measured: Mapping[str, Json], run: Trained) -> float | None:
    """Return the total seconds of a cell: profiling if the run reads the profile, training, and the
    seconds lost to kills; None if a part is unknown."""
    found, profile = measured[run.name], measured["profile"]
    if not found or (run.reads_profile and not profile):
        return None
    profiling = profile["seconds"]["profile"] if run.reads_profile else 0.0
    return float(profiling + found["seconds"]["train"] + found["lost"]["seconds"])
