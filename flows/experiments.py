"""What DVC's experiments reached, as a table: a row for every recipe and seed of each.

    python -m flows.experiments

The numbers are those of `dvc exp show`, which gives every one of them a column: of four recipes
with three seeds, eighty."""

import json
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

from flows import commands

COLUMNS = ("recipe", "seed", "pass@1", "greedy", "charged", "charged_mixed", "executed")
METRICS = "data/report/metrics/"


def main() -> None:
    """Ask DVC, and print the table."""
    command = [sys.executable, "-m", "dvc", "exp", "show", "--json"]
    done = subprocess.run(command, cwd=commands.ROOT, stdout=subprocess.PIPE, text=True)
    if done.returncode:
        sys.exit(done.returncode)
    print(table([row for state in json.loads(done.stdout) for row in experiments(state)]))


def experiments(state: dict[str, Any]) -> Iterator[list[str]]:
    """The rows of a commit, or the workspace, and of the experiments that began there."""
    yield from rows(state)
    for child in state.get("experiments") or []:
        yield from rows(child["revs"][0])


def rows(state: dict[str, Any]) -> Iterator[list[str]]:
    """A row for every cell; one with a dash where there is no result yet, as in the queue."""
    name = state.get("name") or (state["rev"] if state["rev"] == "workspace" else state["rev"][:7])
    files = (state.get("data") or {}).get("metrics") or {}
    cells = [found.get("data") or {} for path, found in sorted(files.items()) if METRICS in path]
    for cell in cells or [{}]:
        yield [name, *(words(cell.get(column)) for column in COLUMNS)]


def words(value: Any) -> str:
    return "–" if value is None else f"{value:.5g}" if isinstance(value, float) else str(value)


def table(lines: list[list[str]]) -> str:
    """The rows under their heads, numbers to the right; a name is written once."""
    shown = [["experiment", *COLUMNS]]
    for before, line in zip([[""], *lines], lines, strict=False):
        shown.append(["" if line[0] == before[0] else line[0], *line[1:]])
    widths = [max(map(len, column)) for column in zip(*shown, strict=True)]
    return "\n".join(
        "  ".join(
            word.ljust(width) if place < 2 else word.rjust(width)
            for place, (word, width) in enumerate(zip(line, widths, strict=True))
        ).rstrip()
        for line in shown
    )


if __name__ == "__main__":
    main()
