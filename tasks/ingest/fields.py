"""Values of a row by path, and prompts assembled from several of them.

A path consists of names and indices (`reward_model.ground_truth[0].x`), and can lead into JSON
text. Several alternative paths may be given (`problem|question`): the first one present is used."""

import json
import math
import re
from decimal import Decimal
from functools import lru_cache
from typing import Any

MISSING = object()
"""The value of a field that is missing in the source's row."""
STEP = re.compile(r"\.?(?P<name>[^.\[\]]+)|\[(?P<index>\d+)\]")
BRACES = re.compile(r"\{\{|\}\}|\{(?P<path>[^{}\s][^{}]*)\}")


class Unusable(ValueError):
    """Raised if a row cannot be used. `reason` and the message become its reason and detail in the
    table `rejected`. `source`, unless it is None, replaces the entry's name."""

    def __init__(self, detail: str, reason: str = "malformed", source: str | None = None) -> None:
        super().__init__(detail)
        self.reason = reason
        self.source = source


def field(record: Any, path: str) -> Any:
    """Return the value at `path`, or MISSING. A field name that itself contains path characters is
    also found."""
    if isinstance(record, dict) and path in record:
        return record[path]
    found = (at(record, steps(one.strip())) for one in path.split("|"))
    return next((value for value in found if value is not MISSING), MISSING)


@lru_cache(maxsize=256)
def steps(path: str) -> tuple[str | int, ...]:
    """Split a path into names and indices; a path that is not valid is a single name."""
    found = list(STEP.finditer(path))
    if "".join(step[0] for step in found) != path:
        return (path,)
    return tuple(step["name"] or int(step["index"]) for step in found)


def at(value: Any, path: tuple[str | int, ...]) -> Any:
    """Return the value that the steps of a path lead to, or MISSING."""
    for step in path:
        if isinstance(value, str):
            value = decoded(value)
        if isinstance(step, int):
            value = value[step] if isinstance(value, list) and step < len(value) else MISSING
        else:
            value = value.get(step, MISSING) if isinstance(value, dict) else MISSING
        if value is MISSING:
            return MISSING
    return value


def decoded(text: str) -> Any:
    """Parse JSON text, and return its list or mapping; MISSING for other texts."""
    if not text.lstrip().startswith(("{", "[")):
        return MISSING
    try:
        return json.loads(text, parse_float=exact)
    except (ValueError, RecursionError):
        return MISSING


def exact(text: str) -> float | Decimal:
    """Return a JSON number; a Decimal if a float would lose digits."""
    value = float(text)
    if len(text) < 16 or not value or not math.isfinite(value):
        return value
    return value if Decimal(repr(value)) == Decimal(text) else Decimal(text)


def paths(template: str) -> dict[str, bool]:
    """Return the paths in a template, and whether each is marked as optional: `{context?}`. The
    result is empty for a plain field name, which has no braces."""
    found = [match["path"] for match in BRACES.finditer(template) if match["path"]]
    return {path: f"{path}?" in found for path in (one.removesuffix("?") for one in found)}


def filled(template: str, values: dict[str, str]) -> str:
    """Return the template with its fields filled in, and `{{` and `}}` unescaped. The result is
    stripped, because an empty optional field leaves a space beside it."""

    def text(match: re.Match[str]) -> str:
        path = match["path"]
        return values[path.removesuffix("?")] if path else match[0][0]

    return BRACES.sub(text, template).strip()
