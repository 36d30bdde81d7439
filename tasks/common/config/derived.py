"""The `dvc.yaml` of a data root, derived from the project's.

A stage of the project is `python -m tasks.x --params params.yaml --data data`; the same stage of
the root `other` has `--params other/params.yaml --data other`, and all its paths are below that
folder. Its dependencies on code are unchanged."""

import os
from collections.abc import Mapping
from typing import Any

import yaml

from tasks.common.params import ParamsError

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
"""


def own_pipeline(text: str) -> str:
    """Return the `dvc.yaml` of a user's own project, derived from `text`, the installation's file.
    In it, the stage `code` depends on no source files, so it is marked to run every time."""
    main = yaml.safe_load(text)
    del main["stages"]["code"]["deps"]
    main["stages"]["code"]["always_changed"] = True
    return OWN + str(yaml.safe_dump(main, sort_keys=False, width=120))


def pipeline(text: str, folder: str) -> str:
    """Return the `dvc.yaml` of the data root `folder`, derived from the project's file `text`.

    DVC stores all outputs of the root, since git ignores them."""
    main = yaml.safe_load(text)
    stages = {name: relocated(stage, folder) for name, stage in main["stages"].items()}
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
