"""When, from which commit and on which machine the page was made, why stages ran, and why they
sampled anew.

Nothing but the page holds any of this: it differs between equal runs, and nothing depends on the
page."""

import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime

from tasks.common.artifacts import Layout
from tasks.common.pipelines import git_tags, this_host
from tasks.common.sealed import read_note


@dataclass(frozen=True)
class Origin:
    """`made`: when, commit and machine, in words. `ran`: stage, when the flow last ran it, what it
    did and why, oldest first. `sampled`: stage, kind of samples, and what it last reused, sampled
    and why."""

    made: Mapping[str, str]
    ran: list[tuple[str, str, str, str]]
    sampled: list[tuple[str, str, str]]


def origin_of(layout: Layout) -> Origin:
    """Return the origin of what is made now, and the notes that sampling stages left."""
    when = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    machine = f"{this_host()}, {os.cpu_count()} cores, {platform.system()} {platform.machine()}"
    made = {"made": when, "commit": commit_words(git_tags()), "machine": machine}
    return Origin(made, run_notes(layout), notes(layout))


def commit_words(tags: Mapping[str, str]) -> str:
    """Return the commit, and whether files were changed since."""
    commit = tags.get("git")
    if commit is None:
        return "no git repository"
    name, _, changed = commit.partition("-")
    return f"{name[:10]}, with changes" if changed else name[:10]


def run_notes(layout: Layout) -> list[tuple[str, str, str, str]]:
    """Return when and why the flow last ran each stage. A note that is damaged or of another
    version is left out."""
    found = []
    for path in layout.run_note("*").parent.glob("*.json"):
        note = read_note(path)
        if {"when", "outcome", "why"} <= note.keys():
            found.append((path.stem, str(note["when"]), str(note["outcome"]), str(note["why"])))
    return sorted(found, key=lambda one: (one[1], one[0]))


def notes(layout: Layout) -> list[tuple[str, str, str]]:
    """Return what each sampling stage last said of its samples. A note that is damaged or of
    another version is left out: no result depends on it."""
    return [
        (path.stem, kind, str(note["said"]))
        for path in sorted(layout.sampling_note("*").parent.glob("*.json"))
        for kind, note in read_note(path).items()
        if isinstance(note, dict) and "said" in note
    ]
