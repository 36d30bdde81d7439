"""What the result of a cell depends on: the parameters and the code of every stage behind it."""

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
    "store": ("logprobs",),  # without them replay of the profile scores, which costs
}
"""The sections whose values can change a line, and which of their keys (None: all). The other keys
say where something is, how long to wait for it, or when to give up."""

SHARED_STAGES = ("ingest", "policy", "profile")
RECIPE_STAGES = ("allocate", "train", "evaluate")
OWN_FILES = ("tasks/benchmark/cells.py", "tasks/common/device_time.py")
"""What a benchmark adds to the stages: how a plan is cut, and what is measured."""


def values_of(params: Values, sections: Iterable[str]) -> dict[str, Any]:
    """The values of `sections` that can change a result."""
    found = {}
    for name in sections:
        keys, section = SECTIONS[name], params[name]
        found[name] = section if keys is None else {key: section[key] for key in keys}
    return found


def code_of(params: Values, recipe: str, root: Path = ROOT) -> dict[str, str]:
    """A digest for each stage of the code that it can run for this recipe, of the files under
    `root`."""
    # a benchmark asks for the same many times, whatever the seed
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
    """The digest of a cell of the stage `code`."""
    return digest(cell.digests(root))
