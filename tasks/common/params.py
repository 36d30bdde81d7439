"""params.yaml: read once, checked strictly, handed on as frozen dataclasses.

Values live in params.yaml only. A section is read into a dataclass without defaults, so a missing
key, an unknown key or a value of the wrong type fails here, with the key's full name and the keys
that are allowed. A recipe has exactly two keys, `allocate` and `train`; whatever a recipe names
under `train` replaces that key of the base section whole."""

import dataclasses
import math
import re
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml

T = TypeVar("T")
MAX_VALUES = 1_000_000
RECIPE_KEYS = ("allocate", "train")
RECIPE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,63}")


class ParamsError(ValueError):
    """A key of params.yaml is missing, unknown, or has a value of the wrong type."""


@dataclasses.dataclass(frozen=True)
class Experiment:
    """Which recipes run, with which seeds: the axes of the DVC matrix."""

    recipes: list[str]
    seeds: list[int]


def load(path: Path) -> dict[str, Any]:
    """The whole file as a dictionary. Raises ParamsError when it is missing or is not a mapping."""
    try:
        params = yaml.load(path.read_text(), Loader)  # nosec B506  # a SafeLoader
    except FileNotFoundError as error:
        raise ParamsError(
            f"{path} does not exist: name the parameters with --params FILE"
        ) from error
    except yaml.YAMLError as error:
        raise ParamsError(f"{path} is not YAML: {in_one_line(error)}") from error
    except (UnicodeDecodeError, RecursionError) as error:
        raise ParamsError(f"{path} is not YAML: {type(error).__name__}, {error}") from error
    if not isinstance(params, dict):
        raise ParamsError(f"{path} holds {type(params).__name__}, not sections of parameters")
    if num_values(params, {}) > MAX_VALUES:
        raise ParamsError(
            f"{path} stands for more than {MAX_VALUES:,} values: an alias (*name) repeats another, "
            "or itself. Write them out"
        )
    check_finite(params, path.name)
    check_cells(params, path.name)
    return params


class Loader(yaml.SafeLoader):
    """YAML without merges of lists, which double what they merge."""

    def flatten_mapping(self, node: yaml.MappingNode) -> None:
        for key, value in node.value:
            if key.tag == "tag:yaml.org,2002:merge" and isinstance(value, yaml.SequenceNode):
                raise yaml.constructor.ConstructorError(
                    None, None, "<< takes one mapping here, and no list", key.start_mark
                )
        super().flatten_mapping(node)


def in_one_line(error: yaml.YAMLError) -> str:
    """What is wrong, and where."""
    mark = getattr(error, "problem_mark", None)
    place = f" (line {mark.line + 1}, column {mark.column + 1})" if mark else ""
    return " ".join(str(getattr(error, "problem", None) or error).split()) + place


def num_values(value: Any, known: dict[int, float]) -> float:
    """How many values YAML's aliases make of a value, without making them: each is looked at once.
    One that holds itself has no end."""
    if id(value) not in known:
        known[id(value)] = math.inf  # until its parts are counted
        parts = value.values() if isinstance(value, dict) else as_list(value)
        known[id(value)] = 1 + sum(num_values(part, known) for part in parts)
    return known[id(value)]


def check_cells(values: Mapping[str, Any], file: str) -> None:
    """Raise ParamsError naming a recipe or a seed that can be no part of a path."""
    recipes, experiment = values.get("recipes"), values.get("experiment")
    for name in recipes if isinstance(recipes, dict) else ():
        check_recipe(name, f"{file}: a key of recipes")
    if isinstance(experiment, dict):
        for name in as_list(experiment.get("recipes")):
            check_recipe(name, f"{file}: a name in experiment.recipes")
        for seed in as_list(experiment.get("seeds")):
            if type(seed) is not int or seed < 0:
                raise ParamsError(
                    f"{file}: experiment.seeds has {str(seed)[:100]!r}; a seed is a whole number, "
                    "from 0 on"
                )


def as_list(value: Any) -> list[Any]:
    """A list as it is; nothing for what is none, which is refused where it is read."""
    return value if isinstance(value, list) else []


def check_recipe(name: Any, where: str) -> None:
    """Raise ParamsError unless `name` can be a folder and a part of a DVC stage's name."""
    if not isinstance(name, str) or not RECIPE_NAME.fullmatch(name):
        raise ParamsError(
            f"{where} is {str(name)[:100]!r}; it names folders and stages: up to 64 letters a to "
            "z, digits, _ and -, and no - in front"
        )


def coordinates(stage: str) -> tuple[str, str | None, int | None]:
    """(name, recipe, seed) of a stage as DVC names it: `train@sgpo-0`, `allocate@sgpo`,
    `profile`."""
    name, _, cell = stage.partition("@")
    recipe, _, seed = cell.rpartition("-")
    if recipe and seed.isdecimal():
        return name, recipe, int(seed)
    return name, cell or None, None


def check_finite(value: Any, file: str, *keys: str) -> None:
    """Raise ParamsError naming a number that is infinite or none: it would stand in no digest, and
    in no JSON file."""
    if isinstance(value, Mapping):
        for key, part in value.items():
            check_finite(part, file, *keys, str(key))
    elif isinstance(value, list):
        for place, part in enumerate(value):
            check_finite(part, file, *keys, str(place))
    elif isinstance(value, float) and not math.isfinite(value):
        raise ParamsError(f"{file}: {'.'.join(keys)} is {value}; give a finite number")


def section(params: Mapping[str, Any], name: str, cls: type[T]) -> T:
    """The section `name` as the dataclass `cls`."""
    if name not in params:
        raise ParamsError(
            f"section '{name}' is missing; sections here: {', '.join(sorted(params))}"
        )
    return parse(params[name], cls, name)


def sections(params: Mapping[str, Any], cls: type[T]) -> T:
    """Several sections at once: a dataclass whose fields are named as sections and typed as their
    dataclasses."""
    hints = typing.get_type_hints(cls)
    return cls(**{name: section(params, name, hint) for name, hint in hints.items()})


def recipe(params: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The recipe `name`: `allocate` (its strategy) and `train` (the base section with the recipe's
    keys replaced)."""
    recipes = params.get("recipes", {})
    if name not in recipes:
        raise ParamsError(
            f"recipe '{name}' is unknown; recipes in params.yaml: {', '.join(sorted(recipes))}"
        )
    chosen = recipes[name]
    if not isinstance(chosen, dict) or set(chosen) != set(RECIPE_KEYS):
        keys = sorted(chosen) if isinstance(chosen, dict) else chosen
        raise ParamsError(
            f"recipes.{name} must have exactly the keys {', '.join(RECIPE_KEYS)}; it has {keys}"
        )
    if not isinstance(chosen["train"], dict) or not isinstance(chosen["allocate"], dict):
        raise ParamsError(
            f"recipes.{name}: allocate and train must be mappings; write `train: {{}}` to change "
            "nothing"
        )
    base = params.get("train", {})
    unknown = sorted(set(chosen["train"]) - set(base))
    if unknown:
        raise ParamsError(
            f"recipes.{name}.train.{unknown[0]} is unknown; allowed: {', '.join(sorted(base))}"
        )
    return {"allocate": chosen["allocate"], "train": {**base, **chosen["train"]}}


def parse(value: Any, cls: type[T], where: str) -> T:
    """`value` (from YAML) as the dataclass `cls`; `where` is the key's name in messages."""
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    allowed = ", ".join(fields)
    if not isinstance(value, dict):
        raise ParamsError(f"{where} must be a mapping with the keys {allowed}; it is {value!r}")
    for key in value:
        if key not in fields:
            raise ParamsError(f"{where}.{key} is unknown; allowed: {allowed}")
    hints = typing.get_type_hints(cls)
    for key in fields:
        if key not in value:
            raise ParamsError(f"{where}.{key} is missing; {where} needs: {allowed}")
    return cls(**{key: convert(value[key], hints[key], f"{where}.{key}") for key in fields})


def at_least(least: int, **values: int) -> None:
    """Raise ParamsError naming the value that is below `least`; `__` in a name stands for a dot."""
    for name, value in values.items():
        if value < least:
            raise ParamsError(f"{name.replace('__', '.')} is {value}; it must be at least {least}")


def share(**values: float) -> None:
    """Raise ParamsError naming the value that is below 0 or above 1; `__` in a name stands for a
    dot."""
    for name, value in values.items():
        if not 0 <= value <= 1:
            raise ParamsError(f"{name.replace('__', '.')} is {value}; it must be from 0 to 1")


def convert(value: Any, hint: Any, where: str) -> Any:
    """`value` checked against a type hint. Whole numbers are accepted for floats, nothing else is
    converted."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if dataclasses.is_dataclass(hint):
        return parse(value, typing.cast(type, hint), where)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        words = [word for a in arguments for word in typing.get_args(a)]  # of a Literal
        if isinstance(value, str) and words:
            return convert(value, typing.Literal[tuple(words)], where)
        return convert(value, next(a for a in arguments if a is not type(None)), where)
    if origin is list and isinstance(value, list):
        return [
            convert(item, arguments[0], f"{where}[{index}]") for index, item in enumerate(value)
        ]
    if origin is dict and isinstance(value, dict):
        return {key: convert(item, arguments[1], f"{where}.{key}") for key, item in value.items()}
    if origin is typing.Literal:
        if value in arguments:
            return value
        raise ParamsError(f"{where} is {value!r}; allowed: {', '.join(map(repr, arguments))}")
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if (
        isinstance(hint, type)
        and isinstance(value, hint)
        and not (hint in (int, float) and isinstance(value, bool))
    ):
        return value
    hint_name = getattr(hint, "__name__", str(hint))
    more = (
        " (write exponents with a point and a sign: 1.0e+9)"
        if hint is float and isinstance(value, str)
        else ""
    )
    raise ParamsError(f"{where} is {value!r}, which is not {hint_name}{more}")
