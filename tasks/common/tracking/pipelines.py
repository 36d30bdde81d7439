"""The pipeline to which a stage belongs: WINNOW_PIPELINE if a flow set it, else its launcher's.

The launcher is the nearest `dvc` among the stage's ancestors, else the leader of its process group.
Stages of one `dvc repro` or one script share a pipeline; two stages typed at a prompt do not."""

import os
import secrets
import socket
import subprocess
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import psutil

from tasks.common.checksums import read_checked
from tasks.common.files import ArtifactError, digest
from tasks.common.layout import Layout
from tasks.common.tracking.journal import Event, milliseconds

PIPELINE_VARIABLE = "WINNOW_PIPELINE"
ROOT = Path(__file__).resolve().parents[3]


def start_pipeline() -> str:
    """Return the id of a new pipeline that this process starts. Its stages expect the id in the
    environment variable WINNOW_PIPELINE. MLflow is not imported."""
    return identity(os.getpid(), time.time())


def identity(pid: int, started: float) -> str:
    """Return the id of the pipeline opened by the process `pid` of this host, which started at
    `started`. The same pid on another host or at another time results in another id."""
    origin = digest([this_host(), pid, round(started, 3)])[:4]
    return f"{time.strftime('%Y%m%d-%H%M%S', time.localtime(started))}-{origin}-{pid}"


def current_pipeline() -> Event:
    """Return the pipeline of this process: its `id`, its `kind` (flow, dvc or hand), and the `tags`
    of the process that opened it."""
    if named := os.environ.get(PIPELINE_VARIABLE):
        tags = dict[str, str]()
        with suppress(psutil.Error, ValueError):  # the flow was killed
            tags = process_tags(psutil.Process(int(named.rpartition("-")[2])))
        return {"id": named, "kind": "flow", "tags": tags}
    kind, process = launcher()
    name = identity(process.pid, process.create_time())
    return {"id": name, "kind": kind, "tags": process_tags(process)}


def launcher() -> tuple[str, psutil.Process]:
    """Return ("dvc", the nearest `dvc` above this stage), or ("hand", the stage's group leader)."""
    this = psutil.Process()
    for process in this.parents():
        with suppress(psutil.Error):
            if any(Path(word).name == "dvc" for word in process.cmdline()[:3]):
                return "dvc", process
    with suppress(psutil.Error):
        return "hand", psutil.Process(os.getpgrp())
    return "hand", this


def this_host() -> str:
    return socket.gethostname()


def process_tags(process: psutil.Process) -> dict[str, str]:
    """Return tags that identify a process, to check later whether it is still running."""
    return {"host": this_host(), "process": f"{process.pid} {process.create_time():.0f}"}


def is_alive(tags: Mapping[str, str]) -> bool:
    """Return whether the process identified by `tags` (see `process_tags`) is running and not a
    zombie. A process on another machine counts as running."""
    if tags.get("host") != this_host():
        return True
    pid, started = map(int, tags["process"].split())
    try:
        process = psutil.Process(pid)
        is_same = abs(float(process.create_time()) - started) < 2
        return is_same and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def git_tags() -> dict[str, str]:
    """Return the commit of this code as tags, with `-dirty` if files differ from it, except those
    that a run writes."""
    command = ["git", "--no-optional-locks", "status", "--porcelain=2", "--branch"]
    command += ["--untracked-files=no", "--", ".", ":(exclude)dvc.lock", ":(exclude)data"]
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=5, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return {}
    (_, _, commit), *lines = map(str.split, done.stdout.splitlines())
    if commit == "(initial)":  # there is none
        return {}
    dirty = "-dirty" * any(line[0] != "#" for line in lines)
    return {"git": commit + dirty, "mlflow.source.git.commit": commit}


def start_event(
    layout: Layout, experiment: str, stage: str, recipe: str | None, seed: int | None
) -> Event:
    """Return a record's first event: everything required to create the run, now or in a replay."""
    coordinates = {"stage": stage, "recipe": recipe, "seed": seed}
    tags = {key: str(value) for key, value in coordinates.items() if value is not None}
    run = f" {recipe}/{seed}" if seed is not None else f" {recipe}" if recipe else ""
    return {
        "kind": "start",
        "time": milliseconds(),
        "record": secrets.token_hex(8),
        "experiment": experiment,
        "pipeline": current_pipeline(),
        "name": f"{stage}{run}",
        "tags": {
            **tags,
            **git_tags(),
            **process_tags(psutil.Process()),
            "mlflow.source.name": f"tasks.{stage}",
        },
    }


def axis_of(layout: Layout, recipe: str, seed: int) -> tuple[str, float]:
    """Return the account of a cell's curves over compute, the budget's if that counts FLOPs and
    else charged, and where they begin: at the FLOPs of the profile if the recipe reads it."""
    plan, account = layout.plan(recipe, seed), "charged"
    try:
        budget = read_checked(plan / "budget.json")["budget"]
        if budget and budget["account"] in ("executed", "charged_mixed"):
            account = budget["account"]
        reads = read_checked(plan / "forecast.json")["reads_profile"]
        flops = read_checked(layout.profile / "flops.json")
        return account, float(flops[account]["profile"]) if reads else 0.0
    except (ArtifactError, OSError, LookupError, TypeError):  # of another stage, or damaged
        return account, 0.0


def outputs(layout: Layout, stage: str, recipe: str | None, seed: int | None) -> list[Path]:
    """Return the small output files of a stage, whose digests identify the run that wrote them."""
    name, number = recipe or "", seed or 0
    files = {
        "ingest": [layout.prompts(split) for split in ("train", "validation", "test")],
        "policy": [layout.policy_card],
        "profile": [layout.profile / "profile.parquet"],
        "baseline": [layout.baseline / "metrics.json"],
        "allocate": [
            layout.plan(name, number) / "plan.parquet",
            layout.plan(name, number) / "decisions.parquet",
        ],
        "train": [
            layout.trained_card(name, number),
            layout.train(name, number) / "curve.parquet",
            layout.train(name, number) / "flops.json",
        ],
        "evaluate": [layout.evaluation(name, number) / "metrics.json"],
        "report": [layout.report / "leaderboard.json"],
    }
    return [path for path in files.get(stage, []) if path.is_file()]
