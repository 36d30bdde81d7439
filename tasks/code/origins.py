"""Every value that a run uses, and its origin."""

from collections.abc import Iterator, Mapping
from typing import Any

from tasks.code.effective import SECTIONS, cell_of, complete
from tasks.common import recipes
from tasks.common.config.changes import MISSING, find

Values = Mapping[str, Any]
Row = tuple[str, Any, str]
DEFAULT, FILE = "default", "params.yaml"


def rows(values: Values) -> list[Row]:
    """Return every value of every section: its dotted name, the value, and its origin."""
    whole = complete(values)
    return [
        (name, value, DEFAULT if find(values, name) is MISSING else FILE)
        for section in SECTIONS
        for name, value in leaves(whole[section], section)
    ]


def recipe_rows(values: Values, name: str) -> list[Row]:
    """Return every value with which the recipe is allocated and trained, in the form of `rows`."""
    settings, own = cell_of(values, name), recipes.resolved(values, name)

    def origin(key: str) -> str:
        if find(own, key) is not MISSING:
            return f"recipe {name}"
        slot = ".".join(key.split(".")[:2])  # a slot set by the recipe replaces the whole slot
        is_replaced = isinstance(find(own, f"{slot}.method"), str)
        return DEFAULT if is_replaced or find(values, key) is MISSING else FILE

    return [(key, value, origin(key)) for key, value in leaves(settings, "")]


def leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield the dotted name and the value of every leaf of a nested mapping."""
    if not isinstance(value, Mapping) or not value:
        yield name, value
        return
    for key, inner in value.items():
        yield from leaves(inner, f"{name}.{key}" if name else str(key))
