"""The files that make a folder a data root of its own: its `dvc.yaml`, made from the project's, and
the `params.yaml` of a later round, made from that of the first.

A stage of the project is `python -m tasks.x --params params.yaml --data data`; the same stage of
the root `data/rounds/2` has `--params data/rounds/2/params.yaml --data data/rounds/2`, and all its
paths stand there. What it depends on of the code stays as it is."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tasks.common.editing import set_values
from tasks.common.params import ParamsError, load

MAIN = "data"  # the root of the project's own dvc.yaml
PARAMS = "params.yaml"
HEADER = "# Made by flows.pipeline from {source}: change that file, not this one.\n\n"
IGNORED = """\
# DVC keeps what the pipeline writes here. In git is what says how it is made.
/*
!/.gitignore
!/dvc.yaml
!/dvc.lock
!/params.yaml
!/prompts
!/rounds
"""
# what the report of a later round reads of every earlier one
REPORTED = (
    "policy.json",
    "profile/profile.parquet",
    "report/leaderboard.json",
    "report/summary.json",
)


@dataclass(frozen=True)
class Round:
    """What a later round takes from `earlier` roots, the first round's before all: the prompts of
    the first, and as initial policy the folder `policy` of the last."""

    earlier: tuple[str, ...]
    policy: str


def pipeline(text: str, folder: str, later: Round | None) -> str:
    """Return the `dvc.yaml` of the root `folder` (a path below the project), from the project's.

    Its outputs are all kept by DVC, since git ignores them. A later round has no `ingest`: it reads
    the first round's prompts."""
    main = yaml.safe_load(text)
    stages = {
        name: relocated(stage, folder)
        for name, stage in main["stages"].items()
        if later is None or name != "ingest"
    }
    if later:
        for stage in stages.values():
            stage["deps"] = [prompts_of(later.earlier[0], folder, dep) for dep in stage["deps"]]
        stages["policy"]["cmd"] += " --copy"
        stages["policy"]["deps"].append(later.policy)
        stages["report"]["cmd"] += "".join(f" --before {root}" for root in later.earlier)
        stages["report"]["deps"] += [
            f"{root}/{name}" for root in later.earlier for name in REPORTED
        ]
    shown = {
        kind: [path.removeprefix(f"{MAIN}/") for path in main.get(kind, [])]
        for kind in ("metrics", "plots")
    }
    written: str = yaml.safe_dump({"stages": stages, **shown}, sort_keys=False, width=120)
    return HEADER.format(source="dvc.yaml") + written


def relocated(stage: Mapping[str, Any], folder: str) -> dict[str, Any]:
    """Return a stage of the project with all its data below `folder`, run where it always is."""
    here = f"--params {PARAMS} --data {MAIN}"
    if here not in stage["cmd"]:
        raise ParamsError(f"dvc.yaml: the command {stage['cmd']!r} must say {here}")
    return {
        **({"matrix": stage["matrix"]} if "matrix" in stage else {}),
        "wdir": os.path.relpath(".", folder),
        "cmd": stage["cmd"].replace(here, f"--params {folder}/{PARAMS} --data {folder}"),
        "deps": [moved(dep, folder) for dep in stage["deps"]],
        "params": [
            {f"{folder}/{PARAMS}" if file == PARAMS else moved(file, folder): keys}
            for entry in stage["params"]
            for file, keys in entry.items()
        ],
        "outs": [
            moved(out if isinstance(out, str) else next(iter(out)), folder) for out in stage["outs"]
        ],
    }


def moved(path: str, folder: str) -> str:
    """Return where a path of the main root stands below another; other paths as they are."""
    return folder + path.removeprefix(MAIN) if path.startswith(f"{MAIN}/") else path


def prompts_of(first: str, folder: str, path: str) -> str:
    """Return the first round's file for one of the prompts of `folder`; other paths as they are."""
    own = f"{folder}/prompts/"
    return f"{first}/prompts/" + path.removeprefix(own) if path.startswith(own) else path


def parameters(path: Path, first: str, policy: str) -> str:
    """Return the `params.yaml` of a later round, from that of the round `first` at `path`: the same
    values and comments, another initial policy, and the first round's rollout store and record."""
    text = path.read_text()
    values = load(path)
    store, tracking = (values.get(name) or {} for name in ("store", "tracking"))
    shared = {
        "policy.source": policy,
        "store.location": store.get("location") or f"{first}/store",
        "tracking.uri": tracking.get("uri") or f"sqlite:///{first}/tracking/mlflow.db",
    }
    return HEADER.format(
        source=path.name if first == MAIN else f"{first}/{path.name}"
    ) + set_values(text, shared)
