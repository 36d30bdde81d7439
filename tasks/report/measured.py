"""Values that differ between equal runs: seconds, work lost to kills, time and machine of the
report.

They are written to `measured.txt` beside the page. DVC does not track that file, so equal runs
have equal outputs. A cell that was restored or pulled has no measurements here."""

import os
import platform
from collections.abc import Mapping
from datetime import UTC, datetime

from tasks.common.artifacts import Layout
from tasks.common.checksums import read_note_of
from tasks.common.tracking.pipelines import git_tags, this_host
from tasks.report.evidence import Evidence, Json, Trained


def measured_text(layout: Layout, evidence: Evidence) -> str:
    """Return the text of `measured.txt`: time, commit and machine, and the seconds of each run."""
    when = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    machine = f"{this_host()}, {os.cpu_count()} cores, {platform.system()} {platform.machine()}"
    lines = [
        f"made {when} from {commit_words(git_tags())} on {machine}",
        "\nmeasured seconds, and work lost to kills\n",
        *(f"{name}: {words_of(found)}" for name, found in all_measured(layout, evidence).items()),
    ]
    return "\n".join(lines) + "\n"


def all_measured(layout: Layout, evidence: Evidence) -> dict[str, Json]:
    """Return the measurements of the profile and of every training run, by name. They are empty if
    the note is missing or belongs to another run."""
    of = {"profile": ("profile", layout.profile / "profile.parquet")}
    for run in evidence.trained:
        path = layout.train(run.recipe, run.seed) / "curve.parquet"
        of[run.name] = (f"{run.recipe}-{run.seed}", path)
    return {name: read_note_of(layout.measured(note), file) for name, (note, file) in of.items()}


def words_of(found: Json) -> str:
    lost = {f"lost {name}": value for name, value in found.get("lost", {}).items()}
    parts = {**found.get("seconds", {}), **lost}
    return ", ".join(f"{name} {value:,.1f}" for name, value in parts.items()) or "not measured here"


def total_seconds(measured: Mapping[str, Json], run: Trained) -> float | None:
    """Return the total seconds of a cell: profiling if the run reads the profile, training, and the
    seconds lost to kills; None if a part is unknown."""
    found, profile = measured[run.name], measured["profile"]
    if not found or (run.reads_profile and not profile):
        return None
    profiling = profile["seconds"]["profile"] if run.reads_profile else 0.0
    return float(profiling + found["seconds"]["train"] + found["lost"]["seconds"])


def commit_words(tags: Mapping[str, str]) -> str:
    """Return the commit as text, and whether files differ from it."""
    commit = tags.get("git")
    if commit is None:
        return "no git repository"
    name, _, changed = commit.partition("-")
    return f"{name[:10]}, with changes" if changed else name[:10]
