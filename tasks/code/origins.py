"""Every value that a run uses, and its origin; and a parameter file without the defaults."""

import dataclasses
import io
import re
from collections.abc import Iterator, Mapping
from typing import Any

from ruamel.yaml import YAML

from tasks.code.effective import SECTIONS, as_dict, cell_of, complete, train_of
from tasks.common import params, recipes
from tasks.common.config.changes import MISSING, find
from tasks.common.params import ParamsError, is_required

Values = Mapping[str, Any]
Row = tuple[str, Any, str]
DEFAULT, FILE = "default", "params.yaml"
MERGE = re.compile(r"^[^#]*(^|[{,\s])<<\s*:", re.MULTILINE)


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
    chosen, own = cell_of(values, name), recipes.resolved(values, name)

    def origin(key: str) -> str:
        if find(own, key) is not MISSING:
            return f"recipe {name}"
        slot = ".".join(key.split(".")[:2])  # a slot that the recipe names is whole
        is_replaced = isinstance(find(own, f"{slot}.method"), str)
        return DEFAULT if is_replaced or find(values, key) is MISSING else FILE

    return [(key, value, origin(key)) for key, value in leaves(chosen, "")]


def leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield every value that is not a mapping, with its dotted name."""
    if not isinstance(value, Mapping) or not value:
        yield name, value
        return
    for key, inner in value.items():
        yield from leaves(inner, f"{name}.{key}" if name else str(key))


def minimal(text: str) -> str:
    """Return a parameter file without default values, and without recipes that equal a built-in
    one; other comments stay. Raise ParamsError for an unreadable file."""
    if MERGE.search(text):
        raise ParamsError("a file that merges mappings with << is not shortened: write them out")
    file = YAML()
    file.width, file.preserve_quotes = 110, True
    shown, values = file.load(text), params.parsed(text)  # ruamel reads `no` as a text
    complete(values)
    for name in [name for name in values if name in SECTIONS]:
        drop(shown, values, name, defaults_of(values, name))
    own = values.get("recipes") or {}
    for name in [name for name in own if is_built_in(values, name)]:
        del own[name], shown["recipes"][name]
    if not own:
        shown.pop("recipes", None)
    out = io.StringIO()
    file.dump(shown, out)
    return out.getvalue()


def defaults_of(values: Values, section: str) -> dict[str, Any]:
    """Return the defaults of a section's fields; fields without a default are as in the file."""
    if section == "train":
        return train_of({"experiment": values["experiment"]})
    fields = dataclasses.fields(SECTIONS[section])
    needed = {field.name: values[section][field.name] for field in fields if is_required(field)}
    found = as_dict({section: needed}, section)
    return {name: value for name, value in found.items() if name not in needed}


def drop(shown: Any, values: Any, key: str, usual: Any) -> None:
    """Remove the key, or the parts of its mapping, that equal the default `usual`, from `shown` and
    `values`. A slot is kept whole."""
    value = values[key]
    if value != usual and isinstance(value, dict) and is_merged(usual):
        for name in [name for name in value if name in usual]:
            drop(shown[key], value, name, usual[name])
    if value in (usual, {}):
        del shown[key], values[key]


def is_merged(usual: Any) -> bool:
    """Return whether a default is a mapping that is merged key by key; a slot is not."""
    return isinstance(usual, Mapping) and "method" not in usual


def is_built_in(values: Values, name: str) -> bool:
    """Return whether a recipe of the file equals the built-in recipe of its name."""
    others = {key: recipe for key, recipe in values["recipes"].items() if key != name}
    without = {**values, "recipes": others}
    return name in recipes.names(without) and cell_of(values, name) == cell_of(without, name)
