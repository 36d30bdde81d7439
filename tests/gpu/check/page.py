"""The page of the results."""

from collections.abc import Mapping
from itertools import groupby
from typing import Any

from tests.bench.tables import table


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
