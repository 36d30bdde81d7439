"""The inputs of a cell's result: the parameters and the code of every stage before it."""

import importlib
import json
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from tasks.common.code import ROOT
from tasks.common.code import digest_of as file_digest
from tasks.common.files import digest

Values = Mapping[str, Any]

SECTIONS: dict[str, tuple[str, ...] | None] = {
    "ingest": None,
    "policy": None,
    "sampling": None,
    "profile": None,
    "gates": None,
    "allocate": ("seed",),  # the passes follow from the budget
    "train": None,
    "learner": None,  # padding and shared prompts are in `executed`
    "evaluate": None,
    "engine": ("name", "device", "dtype", "max_rows"),
    "verify": ("seconds", "memory_gb", "verifiers"),
    "store": ("logprobs",),  # without them, replay of the profile has to score, at a cost
}
"""The sections with values that can change a line, and their relevant keys (None: all). The other
keys are locations, waiting times and time limits."""

SHARED_STAGES = ("ingest", "policy", "profile")
RECIPE_STAGES = ("allocate", "train", "evaluate")
OWN_FILES = ("tasks/benchmark/cells.py", "tasks/common/accounting/device_time.py")
"""The benchmark's own code, besides the stages: the cutting of plans, and the measurements."""


def values_of(params: Values, sections: Iterable[str]) -> dict[str, Any]:
    """Return the values of `sections` that can change a result."""
    found = {}
    for name in sections:
        keys, section = SECTIONS[name], params[name]
        found[name] = section if keys is None else {key: section[key] for key in keys}
    return found


def code_of(params: Values, recipe: str, root: Path = ROOT) -> dict[str, str]:
    """Return, for each stage, a digest of the code that it can run for this recipe, from the files
    under `root`."""
    # cached: a benchmark needs the same digests many times, independent of the seed
    alone: dict[str, Any] = {"experiment": {"recipes": [recipe], "seeds": [0]}}
    alone["recipes"] = {recipe: params["recipes"][recipe]}
    return dict(digests(json.dumps({**params, **alone}, sort_keys=True), recipe, root))


@cache
def digests(params: str, recipe: str, root: Path) -> dict[str, str]:
    # by name: no stage imports another
    cells = importlib.import_module("tasks.code.cells").cells(json.loads(params), root)
    names = {name: name for name in SHARED_STAGES}
    names |= {name: f"{recipe}/{name}" for name in RECIPE_STAGES}
    own = digest([file_digest(root / name) for name in OWN_FILES])
    return {"cells": own, **{name: digest_of(cells[cell], root) for name, cell in names.items()}}


@cache
def digest_of(cell: Any, root: Path) -> str:
    """Return the digest of the code of a cell."""
    return digest(cell.digests(root))
