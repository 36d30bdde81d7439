"""Differences between two sets of values, as text: `sampling.temperature 1.0 -> 0.8`."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from tasks.common.redaction import without_secrets

MISSING = object()
MAX_WIDTH = 48


def differences(name: str, before: Any, after: Any) -> Iterator[str]:
    """Yield `name before -> after` for every leaf that differs between two values."""
    if isinstance(before, Mapping) and isinstance(after, Mapping):
        for key in dict.fromkeys([*before, *after]):
            yield from differences(
                f"{name}.{key}", before.get(key, MISSING), after.get(key, MISSING)
            )
    elif before != after:
        yield f"{name} {show(before)} -> {show(after)}"


def show(value: Any) -> str:
    """Return a value as JSON without the secrets of addresses, or `(none)` for MISSING, truncated
    to MAX_WIDTH characters."""
    text = "(none)" if value is MISSING else without_secrets(json.dumps(value, ensure_ascii=False))
    return text if len(text) <= MAX_WIDTH else text[: MAX_WIDTH - 3] + "..."


def find(values: Any, dotted: str) -> Any:
    """Return the value under a dotted name, or MISSING."""
    for key in dotted.split("."):
        if not isinstance(values, Mapping) or key not in values:
            return MISSING
        values = values[key]
    return values
