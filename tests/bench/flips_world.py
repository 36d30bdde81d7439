"""The world of `flips`: every kind of file that is read again, and who reads it.

All of it is made by the project's own stages and functions, from the parameters of the tests of
training: 30 sums, a policy that is right about one time in three, two recipes, of which one trains
on the profile's samples, and a training that was killed."""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from flows import overrides
from tasks.code.__main__ import write as write_code
from tasks.common import params
from tasks.common.code import ROOT
from tasks.common.files import ArtifactError, digest, digest_file
from tasks.common.journal import Journal, read_events
from tasks.common.layout import Layout
from tasks.common.pipelines import current_pipeline
from tasks.common.sealed import read_note, read_sealed, write_sealed
from tasks.common.stage import Stage
from tasks.grading.judging import VerdictStore
from tasks.grading.verdict import Verdict
from tasks.harness import records
from tasks.report import rounds
from tests.bench.world import PROJECT
from tests.parameters import every_value
from tests.policies import make_guesser
from tests.train.worlds import PARAMS

RECIPES = ("r", "s")
KILLED = 1  # the seed of the training that was killed
PIPELINE = "20260102-100000-beef"


@dataclass(frozen=True)
class Reader:
    """What reads files: its name, and a function of the world that returns what it made of them, by
    name. Differences in `in_words` are allowed where they are said: they change no result."""

    name: str
    read: Callable[[Layout], dict[str, Any]]
    in_words: tuple[str, ...] = ()

    def words(self, found: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in found.items() if name in self.in_words}

    def rest(self, found: dict[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in found.items() if name not in self.in_words}


@dataclass(frozen=True)
class Kind:
    """Files of one kind: where they stand, and the names of their readers."""

    pattern: str
    readers: tuple[str, ...]


def values() -> dict[str, Any]:
    """The parameters."""
    project = every_value()
    recipe = {"allocate": {"strategy": "uniform", "group_size": 4}, "train": {}}
    replay = {"method": "profile", "share": 0.5, "capacity": 4}
    return {
        **PARAMS,
        "experiment": {"recipes": list(RECIPES), "seeds": [0]},
        "ingest": {**project["ingest"], "splits": {"train": 12, "validation": 4, "test": 6}},
        "policy": {**project["policy"], "source": "guesser"},
        "profile": {"num_samples": 4},
        "allocate": {"passes": 1, "seed": 0},
        "report": {**project["report"], "num_bootstrap": 10},
        "train": {**PARAMS["train"], "validation": {"num_samples": 1, "every_share": 0.5}},
        "recipes": {"r": recipe, "s": {**recipe, "train": {"replay": replay}}},
    }


def make(root: Path) -> None:
    """Make the world at `root`."""
    layout = begin(root)
    run_stage_named("baseline", layout)
    run_stage_named("allocate@s-0", layout)
    for recipe in RECIPES:
        for stage in ("train", "evaluate"):
            run_stage_named(f"{stage}@{recipe}-0", layout)
    run_stage_named("report", layout)
    run_stage_named(f"allocate@r-{KILLED}", layout)
    make_notes(layout)
    make_record(layout)
    kill_training(layout)


def begin(root: Path) -> Layout:
    """Make the first stages of the world: no training."""
    root.mkdir(parents=True)
    make_guesser(root / "guesser")
    rows = [
        {"question": f"{a} + {b} =", "answer": str(a + b), "level": str(a)}
        for a in range(5)
        for b in range(6)
    ]
    (root / "sums.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    made = values()
    named = dict.fromkeys(("options", "golds", "tolerance", "extract", "json"))
    fields = {"prompt": "question", "answer": "answer", "level": "level", "verifier": "numeric"}
    settings = {"path": str(root / "sums.jsonl"), "name": "sums", **fields, **named}
    made["ingest"]["sources"] = [{"preset": "mapping", "settings": settings}]
    made["ingest"]["contamination"]["overlap"] = None
    made["policy"]["source"] = str(root / "guesser")
    (root / "params.yaml").write_text(yaml.safe_dump(made))
    layout = Layout(root)
    for stage in ("ingest", "policy", "profile", "allocate@r-0"):
        run_stage_named(stage, layout)
    return layout


def make_notes(layout: Layout) -> None:
    """What flows, records and judges leave."""
    note = {"when": "2026-01-02 10:00 UTC", "outcome": "ran", "why": "num_samples 8 -> 9"}
    write_sealed(layout.run_note("profile"), note)
    write_sealed(layout.run_note("train@r-0"), note)
    os.environ["WINNOW_PIPELINE"] = PIPELINE
    tags = {"process": "1", "host": "here"}
    pipeline = {"id": PIPELINE, "kind": "flow", "tags": tags, "recorded": False}
    write_sealed(layout.tracking / "pipeline.json", pipeline)
    also = {"id": "5d41402a", "key": "91c0", "curve": "grpo/0", "result": None}
    write_sealed(layout.tracking / "also" / "r" / "0.json", also)
    start = {"kind": "start", "name": "profile", "record": "beef", "time": 1, "tags": tags}

    def away() -> Any:
        raise OSError("the server is away")

    journal = Journal("http://127.0.0.1:9", start, layout.tracking, away)
    for step in range(20):
        journal.tell("metrics", points=[{"values": {"reward": step / 7}, "step": step}])
    store = VerdictStore(layout.judged)
    for key in range(20):
        store.put(f"{key:016x}", Verdict("correct" if key % 3 else "wrong", f"{key}", None), 30)
    before = (layout.root / "params.yaml").read_text()
    during = digest(before)
    write_sealed(overrides.note_of(layout), {"before": before, "during": during})


def make_record(layout: Layout) -> None:
    """What a benchmark of others and the stage `code` leave."""
    cell = records.Subject("r", 0)
    record = {
        "recipe": "r",
        "seed": 0,
        "task": "sums",
        "evidence": digest_file(cell.evidence(layout)),
        "metrics": {"acc": {"value": 0.25, "stderr": 0.02}},
        "subtasks": {},
        "num_samples": 40,
        "is_told": False,
    }
    write_sealed(records.path_of(layout, cell, "sums", {}), record)
    write_code(params.load(layout.root / "params.yaml"), ROOT, layout.code_folder)


def kill_training(layout: Layout) -> None:
    """Train until there are checkpoints and rollouts in flight, and kill it."""
    paths = ["--params", str(layout.root / "params.yaml"), "--data", str(layout.root)]
    command = [sys.executable, "-m", "tasks.train", *paths, "--recipe", "r", "--seed", str(KILLED)]
    process = subprocess.Popen(command, cwd=PROJECT, stderr=subprocess.DEVNULL)
    while not all(
        list(layout.checkpoints.glob(pattern)) for pattern in ("*/step-*-000003", "*/in_fl*")
    ):
        if process.poll() is not None:
            raise RuntimeError("the training ended before it could be killed")
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    for unfinished in layout.checkpoints.glob("*/.*"):
        shutil.rmtree(unfinished) if unfinished.is_dir() else unfinished.unlink()


def run_stage_named(name: str, layout: Layout) -> None:
    """Run a stage by its name in DVC, such as `train@r-0`, without a record."""
    stage, _, cell = name.partition("@")
    recipe, _, seed = cell.rpartition("-")
    module = __import__(
        f"tasks.{'evaluate' if stage == 'baseline' else stage}.run", fromlist=["main"]
    )
    made = params.load(layout.root / "params.yaml")
    run = Stage.unrecorded(stage, made, layout, recipe or None, int(seed) if seed else None)
    if stage == "policy":
        run = replace(run, options=argparse.Namespace(**{**vars(run.options), "copy": True}))
    module.main(run)


# --------------------------------------------------------------------------------------------------
# the readers


def outputs(folder: Path) -> dict[str, bytes]:
    """The files below a folder but for measured costs."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "cost.json"
    }


def by_stage(name: str, folder: str) -> Callable[[Layout], dict[str, Any]]:
    """Run a stage; what it writes to a folder."""

    def found(layout: Layout) -> dict[str, Any]:
        run_stage_named(name, layout)
        return outputs(layout.root / folder)

    return found


def reported(layout: Layout) -> dict[str, Any]:
    """Run the report: its figures, and apart from them the page, without when it was made."""
    run_stage_named("report", layout)
    found: dict[str, Any] = outputs(layout.report)
    _, _, page = found.pop("index.html").partition(b"<dt>made</dt>")
    return {**found, "page": page.partition(b"</dd>")[2]}


def resumed(layout: Layout) -> dict[str, Any]:
    """Let the killed training end; what it wrote, and what the kill cost."""
    run_stage_named(f"train@r-{KILLED}", layout)
    folder = layout.train("r", KILLED)
    return {**outputs(folder), "lost": read_sealed(folder / "cost.json")["lost"]}


def next_round(layout: Layout) -> dict[str, Any]:
    """What the report of the next round reads."""
    found = rounds.read_round(1, layout, read_sealed(layout.policy_card), ("r", 0))
    return {"round": repr(found)}


def code(layout: Layout) -> dict[str, Any]:
    """The digests of the code, made as before every run."""
    write_code(params.load(layout.root / "params.yaml"), ROOT, layout.code_folder)
    return outputs(layout.code_folder)


def put_back(layout: Layout) -> dict[str, Any]:
    """The parameters after a run with overrides that was killed."""
    path = layout.root / "params.yaml"
    overrides.put_back(path, overrides.note_of(layout))
    return {"params": path.read_text(), "note": overrides.note_of(layout).exists()}


def pending(layout: Layout) -> dict[str, Any]:
    """The events that wait for the tracking server. A damaged file stays where it is."""
    (path,) = (layout.tracking / "pending").glob("*.jsonl")
    try:
        return {"events": read_events(path)}
    except ValueError as error:
        raise ArtifactError(str(error)) from error


def verdicts(layout: Layout) -> dict[str, Any]:
    """The verdicts of judges; those that are not there are asked for again."""
    known = VerdictStore(layout.judged).get([f"{key:016x}" for key in range(20)])
    return {
        f"{key:016x}": known.get(
            f"{key:016x}", (Verdict("correct" if key % 3 else "wrong", f"{key}", None), 30)
        )
        for key in range(20)
    }


def pipeline(layout: Layout) -> dict[str, Any]:
    return {"tags": current_pipeline(layout)["tags"]}


def of_cell(stage: str, place: str, recipe: str) -> Reader:
    name = f"{stage}@{recipe}-0"
    return Reader(name, by_stage(name, f"runs/{recipe}/0/{place}"))


CELL_STAGES = {"allocate": "plan", "train": "train", "evaluate": "eval"}
READERS = {
    reader.name: reader
    for reader in (
        Reader("profile", by_stage("profile", "profile")),
        Reader("baseline", by_stage("baseline", "baseline")),
        *(of_cell(*item, recipe) for item in CELL_STAGES.items() for recipe in RECIPES),
        Reader("report", reported, in_words=("page",)),
        Reader("resumed training", resumed, in_words=("lost",)),
        Reader("next round", next_round),
        Reader("code", code),
        Reader("parameters put back", put_back),
        Reader("replay", pending),
        Reader("judge", verdicts),
        Reader("pipeline", pipeline, in_words=("tags",)),
        Reader(
            "other trackers",
            lambda layout: read_note(layout.tracking / "also" / "r" / "0.json"),
            in_words=("id", "key", "curve", "result"),
        ),
        Reader("benchmarks", lambda layout: {"table": records.table(layout)}),
    )
}
SAMPLING = ("profile", "baseline")
TRAINING = ("train@r-0", "train@s-0")
EVALUATION = ("evaluate@r-0", "evaluate@s-0")
KINDS = {
    "prompts, train": Kind("prompts/train.parquet", ("profile", "allocate@s-0", *TRAINING)),
    "prompts, validation": Kind("prompts/validation.parquet", TRAINING),
    "prompts, test": Kind("prompts/test.parquet", ("baseline", "report", *EVALUATION)),
    "policy.json": Kind("policy.json", (*SAMPLING, "allocate@r-0", *TRAINING, "report")),
    "policy": Kind("policy/*", (*SAMPLING, "allocate@s-0", *TRAINING)),
    "profile": Kind("profile/profile.parquet", ("allocate@r-0", "report")),
    "profile, rollouts": Kind("profile/rollouts.parquet", ("allocate@s-0",)),
    "profile, flops and cost": Kind("profile/[fc]*.json", ("report",)),
    "baseline": Kind("baseline/*", ("report",)),
    "plan": Kind("runs/s/0/plan/plan.parquet", ("train@s-0",)),
    "samples": Kind("runs/s/0/plan/samples.parquet", ("train@s-0",)),
    "budget": Kind("runs/s/0/plan/budget.json", ("train@s-0",)),
    "decisions": Kind("runs/*/0/plan/decisions.parquet", ("report",)),
    "forecast": Kind("runs/*/0/plan/forecast.json", ("report",)),
    "trained policy": Kind("runs/r/0/train/policy/*", ("evaluate@r-0",)),
    "trained policy.json": Kind("runs/r/0/train/policy.json", ("evaluate@r-0",)),
    "steps, curve, rollouts": Kind("runs/*/0/train/*.parquet", ("report",)),
    "train, flops and cost": Kind("runs/*/0/train/[fc]*.json", ("report",)),
    "evaluation": Kind("runs/*/0/eval/*", ("report",)),
    "report": Kind("report/[ls]*.json", ("next round",)),
    "store": Kind("store/**/*", SAMPLING),
    "checkpoints": Kind("checkpoints/*/step-*/*", ("resumed training",)),
    "parts of rollouts": Kind("checkpoints/*/rollouts-*", ("resumed training",)),
    "in flight": Kind("checkpoints/*/in_flight.parquet", ("resumed training",)),
    "executed work": Kind("checkpoints/*/work.json", ("resumed training",)),
    "key.json": Kind("checkpoints/*/key.json", ("resumed training",)),
    "notes": Kind("notes/*", ("report",)),
    "draws": Kind("draws/*", ("report", "profile")),
    "code digests": Kind("code/**/*.json", ("code",)),
    "overrides": Kind("locks/overrides.json", ("parameters put back",)),
    "waiting records": Kind("tracking/pending/*", ("replay",)),
    "pipeline": Kind("tracking/pipeline.json", ("pipeline",)),
    "other trackers": Kind("tracking/also/**/*", ("other trackers",)),
    "verdicts of judges": Kind("judged.sqlite", ("judge",)),
    "benchmarks": Kind("harness/**/*.json", ("benchmarks",)),
}


def files(world: Path, readers: Collection[str]) -> dict[str, list[str]]:
    """The files of each kind that these readers read, by their names in the world. Every kind has
    some."""
    found = {
        kind: sorted(
            path.relative_to(world).as_posix()
            for path in world.glob(one.pattern)
            if path.is_file() and path.stat().st_size
        )
        for kind, one in KINDS.items()
        if set(one.readers) & set(readers)
    }
    missing = [kind for kind, names in found.items() if not names]
    if missing:
        raise RuntimeError(f"the world has no files of {', '.join(missing)}")
    return found
