"""Every value that a run uses, and where it is from; and a parameter file without the defaults."""

import dataclasses
import io
import re
from collections.abc import Iterator, Mapping
from typing import Any

from ruamel.yaml import YAML

from tasks.code.effective import SECTIONS, cell_of, complete, train_of
from tasks.common import params, recipes
from tasks.common.changes import MISSING, find
from tasks.common.params import ParamsError

Values = Mapping[str, Any]
Row = tuple[str, Any, str]
DEFAULT, FILE = "default", "params.yaml"
MERGE = re.compile(r"^[^#]*(^|[{,\s])<<\s*:", re.MULTILINE)


def rows(values: Values) -> list[Row]:
    """Return every value of every section: its dotted name, itself, and where it is from."""
    whole = complete(values)
    return [
        (name, value, DEFAULT if find(values, name) is MISSING else FILE)
        for section in SECTIONS
        for name, value in leaves(whole[section], section)
    ]


def recipe_rows(values: Values, name: str) -> list[Row]:
    """Return every value that the recipe is allocated and trained with, as `rows`."""
    chosen, own = cell_of(values, name), recipes.resolved(values, name)

    def origin(key: str) -> str:
        if find(own, key) is not MISSING:
            return f"recipe {name}"
        slot = ".".join(key.split(".")[:2])  # one that the recipe names is whole
        is_replaced = isinstance(find(own, f"{slot}.method"), str)
        return DEFAULT if is_replaced or find(values, key) is MISSING else FILE

    return [(key, value, origin(key)) for key, value in leaves(chosen, "")]


def leaves(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Every value that is no mapping, with its dotted name."""
    if not isinstance(value, Mapping) or not value:
        yield name, value
        return
    for key, inner in value.items():
        yield from leaves(inner, f"{name}.{key}" if name else str(key))


def minimal(text: str) -> str:
    """Return a parameter file without what is a default, and without recipes that equal a built-in
    one; the comments beside all else stay. Raises ParamsError for a file that cannot be read."""
    if MERGE.search(text):
        raise ParamsError("a file that merges mappings with << is not shortened: write them out")
    file = YAML()
    file.width, file.preserve_quotes = 110, True
    shown, values = file.load(text), params.parsed(text)  # `no` is a text to the former
    complete(values)
    for name in [name for name in values if name in SECTIONS]:
        drop(shown, values, name, defaults_of(name))
    own = values.get("recipes") or {}
    for name in [name for name in own if is_built_in(values, name)]:
        del own[name], shown["recipes"][name]
    if not own:
        shown.pop("recipes", None)
    out = io.StringIO()
    file.dump(shown, out)
    return out.getvalue()


def defaults_of(section: str) -> dict[str, Any]:
    """The defaults of a section's fields, of those that have one."""
    if section == "train":
        return train_of({})
    cls = SECTIONS[section]
    found = {field.name: default_of(field) for field in dataclasses.fields(cls)}
    return {name: value for name, value in found.items() if value is not MISSING}


def default_of(field: "dataclasses.Field[Any]") -> Any:
    """The default of a field as plain values, or MISSING."""
    value = field.default
    if field.default_factory is not dataclasses.MISSING:
        value = field.default_factory()
    if value is dataclasses.MISSING:
        return MISSING
    is_nested = dataclasses.is_dataclass(value) and not isinstance(value, type)
    return dataclasses.asdict(value) if is_nested else value


def drop(shown: Any, values: Any, key: str, usual: Any) -> None:
    """Remove the key, or the parts of its mapping, that are as usual, from what is shown and from
    its values. A slot is kept whole."""
    value = values[key]
    if value != usual and isinstance(value, dict) and is_merged(usual):
        for name in [name for name in value if name in usual]:
            drop(shown[key], value, name, usual[name])
    if value in (usual, {}):
        del shown[key], values[key]


def is_merged(usual: Any) -> bool:
    """Whether a default is a mapping that is taken key by key; a slot is not."""
    return isinstance(usual, Mapping) and "method" not in usual


def is_built_in(values: Values, name: str) -> bool:
    """Whether a recipe of the file is the built-in one of its name."""
    others = {key: recipe for key, recipe in values["recipes"].items() if key != name}
    without = {**values, "recipes": others}
    return name in recipes.names(without) and cell_of(values, name) == cell_of(without, name)
