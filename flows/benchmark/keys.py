"""The inputs of a cell's result: the parameter values and the code of its stages."""

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from tasks.code.cells import cells as code_cells
from tasks.code.effective import of_cells
from tasks.common.code import ROOT
from tasks.common.code import digest_of as file_digest
from tasks.common.files import digest

Values = Mapping[str, Any]

SHARED_STAGES = ("ingest", "policy", "profile")
RECIPE_STAGES = ("allocate", "train", "evaluate")
OWN_FILES = ("flows/benchmark/cells.py", "tasks/common/accounting/device_time.py")
"""The benchmark's own code, besides the stages: the thinning of plans, and the measurements."""


def inputs_of(params: Values, recipe: str, root: Path = ROOT) -> tuple[Values, Values]:
    """Return, by stage, digests of the values that can change this recipe's results, and digests of
    the code under `root` that the stage can run with these values."""
    # cached: a benchmark needs the same digests many times, independent of the seed
    alone: dict[str, Any] = {"experiment": {"recipes": [recipe], "seeds": [0], "budget": None}}
    alone["recipes"] = {recipe: params["recipes"][recipe]}
    return digests(json.dumps({**params, **alone}, sort_keys=True), recipe, root)


@cache
def digests(params: str, recipe: str, root: Path) -> tuple[Values, Values]:
    whole = json.loads(params)
    names = {name: name for name in SHARED_STAGES}
    names |= {name: f"{recipe}/{name}" for name in RECIPE_STAGES}
    values, cells = of_cells(whole), code_cells(whole, root)
    found = {name: values[cell] for name, cell in names.items()}
    del found["allocate"]["allocate"]["passes"]  # they follow from the budget
    found["profile"] = {**found["profile"], "costs": costs_of(whole)}
    own = digest([file_digest(root / name) for name in OWN_FILES])
    return (
        {name: digest(settings) for name, settings in found.items()},
        {"cells": own, **{name: digest_of(cells[cell], root) for name, cell in names.items()}},
    )


def costs_of(whole: Values) -> dict[str, Any]:
    """Return the values that change only costs: padding, the rows of a wave, and whether replayed
    samples of the profile have to be scored."""
    of_engine = {key: whole["engine"][key] for key in ("device", "max_rows")}
    return {**of_engine, "learner": whole["learner"], "logprobs": whole["store"]["logprobs"]}


@cache
def digest_of(cell: Any, root: Path) -> str:
    return digest(cell.digests(root))
