"""Results of DVC's experiments: a row for every recipe and seed of each.

The numbers are those of `dvc exp show`, which uses a column for each: eighty for four recipes with
three seeds."""

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from tabulate import tabulate

from flows.pipeline import commands

COLUMNS = ("recipe", "seed", "pass@1", "greedy", "charged", "charged_mixed", "executed")
METRICS = "data/report/metrics/"


def table() -> str:
    """Return the table of the workspace, the commit and its experiments."""
    command = [sys.executable, "-m", "dvc", "exp", "show", "--json"]
    done = subprocess.run(command, cwd=commands.ROOT, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise commands.CommandError("dvc exp show failed: see its message above")
    found = [row for state in json.loads(done.stdout) for row in rows(state)]
    return str(tabulate([["experiment", *COLUMNS], *found], (), "plain", disable_numparse=True))


def rows(state: dict[str, Any]) -> Iterator[list[str]]:
    """Yield a row for every cell of a commit or the workspace, then the rows of the experiments
    that started there. An experiment without a result, such as a queued one, has dashes."""
    name = state.get("name") or (state["rev"] if state["rev"] == "workspace" else state["rev"][:7])
    files = (state.get("data") or {}).get("metrics") or {}
    cells = [found.get("data") or {} for path, found in sorted(files.items()) if METRICS in path]
    for cell in cells or [{}]:
        yield [name, *(number(cell.get(column)) for column in COLUMNS)]
        name = ""  # the name is only in the first row
    for child in state.get("experiments") or []:
        yield from rows(child["revs"][0])


def number(value: Any) -> str:
    return "–" if value is None else f"{value:.5g}" if isinstance(value, float) else str(value)
