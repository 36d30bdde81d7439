"""Tables of measurements in Markdown."""

from typing import Any


def table(rows: list[dict[str, Any]] | str) -> str:
    """Return a Markdown table. Rows have at least the columns of the first row."""
    if isinstance(rows, str):
        return rows
    columns = list(dict.fromkeys(key for line in rows for key in line))
    lines = [columns, ["---"] * len(columns)] + [
        [cell(c, line.get(c)) for c in columns] for line in rows
    ]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def cell(column: str, value: Any) -> str:
    """Return a value as shown in a table."""
    if isinstance(value, float) and ("share" in column or column == "padding"):
        return f"{value:.1%}"
    return "" if value is None else f"{value:,.4g}" if isinstance(value, float) else str(value)
