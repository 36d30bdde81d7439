"""The page of what was measured."""

from collections.abc import Mapping
from typing import Any

from tests.bench.tables import table


def page(found: Mapping[str, Mapping[str, Any]]) -> str:
    """Every part's rows as a table; rows of other columns begin another."""
    lines = ["# GPU check", ""]
    if any(part["is_small"] for part in found.values()):
        lines += ["Small sizes on a CPU: this shows that the check runs, and nothing of a GPU.", ""]
    for name, part in found.items():
        lines += [f"## {name} ({part['seconds']:.0f} s)", ""]
        for rows in alike(part["rows"]):
            lines += [table(rows), ""]
    return "\n".join(lines)


def alike(rows: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Rows that follow each other and have the same columns."""
    groups: list[list[dict[str, Any]]] = []
    for row in rows:
        if groups and list(groups[-1][0]) == list(row):
            groups[-1].append(row)
        else:
            groups.append([row])
    return groups
