"""The files that make a folder a data root: its `dvc.yaml`, derived from the project's, and the
`params.yaml` of a later round, derived from the first round's.

A stage of the project is `python -m tasks.x --params params.yaml --data data`; the same stage of
the root `data/rounds/2` has `--params data/rounds/2/params.yaml --data data/rounds/2`, and all its
paths are below that folder. Its dependencies on code are unchanged."""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tasks.common.config.editing import set_values
from tasks.common.params import ParamsError, load

MAIN = "data"  # the root of the project's own dvc.yaml
PARAMS = "params.yaml"
HEADER = "# Made by winnow run from {source}: change that file, not this one.\n\n"
OWN = HEADER.format(source="Winnow's own dvc.yaml")
IGNORED = """\
# DVC stores the outputs of the pipeline; git stores the files that define it.
/*
!/.gitignore
!/dvc.yaml
!/dvc.lock
!/params.yaml
!/prompts
!/rounds
"""
# files of every earlier round that the report of a later round reads
REPORTED = (
    "policy.json",
    "profile/profile.parquet",
    "report/leaderboard.json",
    "report/summary.json",
)


@dataclass(frozen=True)
class Round:
    """The inputs of a later round. `earlier` are the roots of the previous rounds, oldest first.
    The prompts are the first round's. `policy` is the folder of the initial policy."""

    earlier: tuple[str, ...]
    policy: str


def own_pipeline(text: str) -> str:
    """Return the `dvc.yaml` of a user's own project, derived from `text`, the installation's file.
    In it, the stage `code` depends on no source files, so it is marked to run every time."""
    main = yaml.safe_load(text)
    del main["stages"]["code"]["deps"]
    main["stages"]["code"]["always_changed"] = True
    return OWN + str(yaml.safe_dump(main, sort_keys=False, width=120))


def pipeline(text: str, folder: str, later: Round | None) -> str:
    """Return the `dvc.yaml` of the data root `folder`, derived from the project's file `text`.

    DVC stores all outputs of the root, since git ignores them. A later round has no stage `ingest`,
    because it reads the first round's prompts."""
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
    """Return a stage, changed to run from the project's folder on the data in `folder`."""
    here = f"--params {PARAMS} --data {MAIN}"
    if here not in stage["cmd"]:
        raise ParamsError(f"dvc.yaml: the command {stage['cmd']!r} must contain {here}")
    return {
        **({"matrix": stage["matrix"]} if "matrix" in stage else {}),
        "wdir": os.path.relpath(".", folder),
        "cmd": stage["cmd"].replace(here, f"--params {folder}/{PARAMS} --data {folder}"),
        **({"always_changed": True} if "always_changed" in stage else {}),
        "deps": [moved(dep, folder) for dep in stage.get("deps", [])],
        "params": [
            {f"{folder}/{PARAMS}" if file == PARAMS else moved(file, folder): keys}
            for entry in stage["params"]
            for file, keys in entry.items()
        ],
        "outs": [relocated_out(out, folder) for out in stage["outs"]],
    }


def relocated_out(out: str | Mapping[str, Any], folder: str) -> Any:
    """Return an output in `folder`, with its option `persist`. DVC's cache stores all of them."""
    if isinstance(out, str):
        return moved(out, folder)
    [(path, options)] = out.items()
    here = moved(path, folder)
    return {here: {"persist": True}} if options.get("persist") else here


def moved(path: str, folder: str) -> str:
    """Return a path below the main root as the same path below `folder`; other paths unchanged."""
    return folder + path.removeprefix(MAIN) if path.startswith(f"{MAIN}/") else path


def prompts_of(first: str, folder: str, path: str) -> str:
    """Return a path in `folder`/prompts as the same path in `first`/prompts; others unchanged."""
    own = f"{folder}/prompts/"
    return f"{first}/prompts/" + path.removeprefix(own) if path.startswith(own) else path


def parameters(path: Path, first: str, policy: str) -> str:
    """Return a later round's `params.yaml`: a copy of the first round's file `path` (comments too),
    but with `policy` as the initial policy and the store and tracking of the root `first`."""
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
