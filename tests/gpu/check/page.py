"""The page of the results."""

from collections.abc import Mapping
from itertools import groupby
from typing import Any


def page(found: Mapping[str, Mapping[str, Any]]) -> str:
    """Return every part's rows as tables, one for consecutive rows with the same columns."""
    lines = ["# GPU check", ""]
    if any(part["is_small"] for part in found.values()):
        lines += ["Small sizes on a CPU: this shows that the check runs, and nothing of a GPU.", ""]
    for name, part in found.items():
        lines += [f"## {name} ({part['seconds']:.0f} s)", ""]
        for _, rows in groupby(part["rows"], key=list):
            lines += [table(list(rows)), ""]
    return "\n".join(lines)


def table(rows: list[dict[str, Any]]) -> str:
    """Return a Markdown table of rows with the same columns."""
    columns = list(rows[0])
    lines = [columns, ["---"] * len(columns), *([cell(c, row[c]) for c in columns] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def cell(column: str, value: Any) -> str:
    """Return a value as shown in a table."""
    if isinstance(value, float) and "share" in column:
        return f"{value:.1%}"
    return "" if value is None else f"{value:,.4g}" if isinstance(value, float) else str(value)
