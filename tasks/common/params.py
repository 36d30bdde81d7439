"""params.yaml: read once, checked strictly, passed on as frozen dataclasses.

The file lists only values that differ from the defaults, which are set in the dataclasses. Each
section is read into its dataclass. An unknown key or a value of the wrong type is an error with the
key's full name and, for an unknown key, the most similar valid one. All problems of a section are
reported at once."""

import copy
import dataclasses
import difflib
import math
import re
import types
import typing
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypeVar, dataclass_transform

import yaml

from tasks.common.redaction import has_credentials, without_secrets

T = TypeVar("T")
MAX_LISTED = 40  # names in a message
WORDS: dict[Any, str] = {
    **{int: "a whole number", float: "a number", bool: "true or false", str: "text"},
    **{list: "a list", dict: "a mapping"},
}
CELL_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,63}")


class ParamsError(ValueError):
    """Raised if keys of a parameter file are missing, unknown, or have invalid values; `problems`
    contains a message for each, without the secrets of addresses."""

    def __init__(self, *problems: str) -> None:
        problems = tuple(map(without_secrets, problems))
        super().__init__("\n".join(problems))
        self.problems = problems


@dataclass_transform(frozen_default=True)
def settings(cls: type[T]) -> type[T]:
    """Make `cls` a frozen dataclass of parameters; a default may be a list or a mapping. The code
    digests exclude the defaults, because the stage `code` writes the values in effect for every
    cell that they affect."""
    for name, value in list(vars(cls).items()):
        if name in cls.__annotations__ and isinstance(value, list | dict):
            setattr(cls, name, dataclasses.field(default_factory=partial(copy.deepcopy, value)))
    return dataclasses.dataclass(frozen=True)(cls)


@settings
class Budget:
    """`experiment.budget`: the compute of every cell, including the profile if the recipe reads it
    (see `tasks/common/accounting/spending.py`)."""

    account: Literal["rollouts", "tokens", "charged", "charged_mixed", "executed"] = "executed"
    amount: float = 6.0e11  # in the account's unit: rollouts, tokens or FLOPs

    def __post_init__(self) -> None:
        above_zero(experiment__budget__amount=self.amount)


@settings
class Experiment:
    """The section `experiment`: the axes of the DVC matrix, and the budget of each cell."""

    recipes: list[str]  # files of recipes/ or keys under `recipes`; all start from the same policy
    seeds: list[int]  # seeds of the runs of every recipe
    budget: Budget | None = None  # same for every cell; null: each cell trains on its whole plan

    def __post_init__(self) -> None:
        for name in ("recipes", "seeds"):
            values = getattr(self, name)
            if not values:
                raise ParamsError(f"experiment.{name} is empty: name at least one")
            if len(set(values)) < len(values):
                raise ParamsError(f"experiment.{name} has a duplicate: {values}")


# ----------------------------------------------------------------------------------------- the file


def load(path: Path) -> dict[str, Any]:
    """Return the whole file as a dictionary. Raise ParamsError if it is missing, is not a YAML
    mapping, or contains an infinite or NaN number, an address with credentials, an invalid recipe
    name or an invalid seed."""
    try:
        params = parsed(path.read_text())
        check_leaves(params, f"{path.name}: ")
    except FileNotFoundError as error:
        raise ParamsError(f"{path} does not exist: restore it, or correct the path") from error
    except yaml.YAMLError as error:
        raise ParamsError(f"{path} is not YAML: {in_one_line(error)}") from error
    except (UnicodeDecodeError, RecursionError) as error:
        raise ParamsError(f"{path} is not YAML: {type(error).__name__}, {error}") from error
    if not isinstance(params, dict):
        what = "is empty" if params is None else f"is a {type(params).__name__}"
        raise ParamsError(f"{path} {what}, not sections of parameters")
    check_cells(params, path.name)
    return params


def parsed(text: str) -> Any:
    """Parse a YAML text, and return its value."""
    return yaml.load(text, Loader)  # nosec B506  # a SafeLoader


class Loader(yaml.SafeLoader):
    """A YAML loader that reads numbers as DVC does (1e-4) and rejects duplicate keys."""

    def compose_mapping_node(self, anchor: str | None) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        seen: set[str] = set()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode) and key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"the key {key.value!r} appears twice", key.start_mark
                )
            seen.add(str(key.value))
        return node


Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"[-+]?(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)[eE][-+]?\d+$"),
    list("-+.0123456789"),
)


def in_one_line(error: yaml.YAMLError) -> str:
    """Return a YAML error and its position as one line."""
    mark = getattr(error, "problem_mark", None)
    place = f" (line {mark.line + 1}, column {mark.column + 1})" if mark else ""
    return " ".join(str(getattr(error, "problem", None) or error).split()) + place


def check_cells(values: Mapping[str, Any], file: str) -> None:
    """Raise a ParamsError naming the first recipe or seed that cannot be part of a path, if any."""
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
    """Return a list unchanged, and an empty list for other values, which a later check refuses."""
    return value if isinstance(value, list) else []


def check_recipe(name: Any, where: str) -> None:
    """Raise ParamsError unless `name` is valid as a folder name and in the name of a DVC stage."""
    if not isinstance(name, str) or not CELL_NAME.fullmatch(name):
        raise ParamsError(
            f"{where} is {str(name)[:100]!r}; it names folders and stages: up to 64 letters a to "
            "z, digits, _ and -, and no - in front"
        )


def coordinates(stage: str) -> tuple[str, str | None, int | None]:
    """Return (name, recipe, seed) from DVC's name of a stage, such as `train@sgpo-0`,
    `allocate@sgpo` or `profile`. The recipe and the seed are None if the name lacks them."""
    name, _, cell = stage.partition("@")
    recipe, _, seed = cell.rpartition("-")
    if recipe and seed.isdecimal():
        return name, recipe, int(seed)
    return name, cell or None, None


def check_leaves(value: Any, file: str, *keys: str) -> None:
    """Raise a ParamsError naming the first infinite or NaN number, which digests and JSON files
    cannot contain, or address with credentials, which dvc.lock and the record would contain."""
    if isinstance(value, Mapping | list):
        for key, part in value.items() if isinstance(value, Mapping) else enumerate(value):
            check_leaves(part, file, *keys, str(key))
    elif isinstance(value, float) and not math.isfinite(value):
        raise ParamsError(f"{file}{'.'.join(keys)} is {value}; give a finite number")
    elif isinstance(value, str) and has_credentials(value):
        raise ParamsError(
            f"{file}{'.'.join(keys)} contains credentials, which would be stored and shown: remove "
            "them, and set the environment variable or file of the table in the guide, under "
            "Security, Secrets"
        )


# ------------------------------------------------------------------------------------ the sections


def section(params: Mapping[str, Any], name: str, cls: type[T]) -> T:
    """Return the section `name` as the dataclass `cls`; a missing section means all defaults."""
    value = params.get(name)
    return parse({} if value is None else value, cls, name)


def sections(params: Mapping[str, Any], cls: type[T]) -> T:
    """Return several sections at once as `cls`, a dataclass with one field per section, whose type
    is the section's dataclass. Raise ParamsError with the problems of all sections."""
    hints = typing.get_type_hints(cls)
    with gathered() as problems:
        found = {name: problems.of(section, params, name, hint) for name, hint in hints.items()}
    return cls(**found)


def parse(value: Any, cls: type[T], where: str) -> T:
    """Return `value` (from YAML) as the dataclass `cls`; `where` is the key's name in messages.
    Raise ParamsError with all problems, or first for an address with credentials."""
    check_leaves(value, "", where)
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    if not isinstance(value, dict):
        raise ParamsError(
            f"{where} must be a mapping with the keys {listed(fields)}; it is {value!r}"
        )
    hints = typing.get_type_hints(cls)
    with gathered() as problems:
        check_keys(value, fields, [n for n, f in fields.items() if is_required(f)], where, problems)
        converted = {
            key: problems.of(convert, value[key], hints[key], f"{where}.{key}")
            for key in fields
            if key in value
        }
    return cls(**converted)


def check_keys(
    value: Mapping[str, Any],
    allowed: Iterable[str],
    required: Iterable[str],
    where: str,
    problems: "Problems",
) -> None:
    """Add to `problems` the unknown keys, and the missing keys that are not merely misspelt."""
    misspelt = set()
    for key in value:
        if key not in allowed:
            misspelt.add(meant(key, allowed))
            problems.add(unknown(f"{where}.{key} is unknown; allowed", key, allowed))
    for key in required:
        if key not in value and key not in misspelt:
            problems.add(f"{where}.{key} is missing; {where} needs: {listed(allowed)}")


def is_required(field: "dataclasses.Field[Any]") -> bool:
    missing = dataclasses.MISSING
    return field.default is missing and field.default_factory is missing


def convert(value: Any, hint: Any, where: str) -> Any:
    """Return `value` if it matches a type hint, else raise ParamsError. If the hint requires it, a
    whole number becomes a float, or a mapping becomes a dataclass. Nothing else is converted."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return value
    if dataclasses.is_dataclass(hint):
        return parse(value, typing.cast(type, hint), where)
    if origin in (typing.Union, types.UnionType):
        return convert_union(value, arguments, where)
    if origin in (list, dict) and isinstance(value, origin):
        keys, name = (value, "{}.{}") if origin is dict else (range(len(value)), "{}[{}]")
        with gathered() as problems:
            converted = {
                key: problems.of(convert, value[key], arguments[-1], name.format(where, key))
                for key in keys
            }
        return converted if origin is dict else list(converted.values())
    if origin is typing.Literal:
        if value in arguments:
            return value
        raise ParamsError(unknown(f"{where} is {value!r}; allowed", value, arguments))
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if (
        isinstance(hint, type)
        and isinstance(value, hint)
        and not (hint in (int, float) and isinstance(value, bool))
    ):
        return value
    raise ParamsError(f"{where} is {value!r}, which is not {WORDS.get(origin or hint, hint)}")


def convert_union(value: Any, arguments: tuple[Any, ...], where: str) -> Any:
    """Return `value` as one type of a union: None if allowed, a string as a word of the Literals if
    there are any, anything else as the first type except None. Raise as `convert` does."""
    if value is None and type(None) in arguments:
        return None
    words = [word for a in arguments for word in typing.get_args(a)]  # of a Literal
    if isinstance(value, str) and words:
        return convert(value, typing.Literal[tuple(words)], where)
    return convert(value, next(a for a in arguments if a is not type(None)), where)


# ---------------------------------------------------------------------------------------- messages


class Problems:
    """A collection of problems, so that one message reports all of them."""

    def __init__(self) -> None:
        self.messages: list[str] = []

    def add(self, message: str) -> None:
        self.messages.append(message)

    def report(self) -> None:
        """Raise ParamsError with all problems, if there are any."""
        if self.messages:
            raise ParamsError(*dict.fromkeys(self.messages))

    def of(self, function: Any, *arguments: Any, **named: Any) -> Any:
        """Return the function's result. If it raises ParamsError, record its problems and return
        None."""
        try:
            return function(*arguments, **named)
        except ParamsError as error:
            self.messages += error.problems
            return None


@contextmanager
def gathered() -> Iterator[Problems]:
    """Yield an empty `Problems`; after the block, raise ParamsError if any were added to it."""
    problems = Problems()
    yield problems
    problems.report()


def unknown(what: str, value: object, known: Iterable[object]) -> str:
    """Return a message with the known names and the nearest one: `WHAT: a, b; did you mean a?`"""
    guess = meant(value, known)
    return f"{what}: {listed(known)}{f'; did you mean {guess}?' if guess else ''}"


def listed(names: Iterable[object]) -> str:
    """Return the first MAX_LISTED names, joined by commas, or `no settings` if there are none."""
    shown = [str(name) for name in names]
    more = f" and {len(shown) - MAX_LISTED} more" if len(shown) > MAX_LISTED else ""
    return (", ".join(shown[:MAX_LISTED]) or "no settings") + more


def meant(value: object, known: Iterable[object]) -> str | None:
    """Return the name in `known` that is most similar to `value`, or None if none is similar."""
    close = difflib.get_close_matches(str(value), [str(name) for name in known], 1)
    return close[0] if close else None


def at_least(least: float, **values: float) -> None:
    """Raise a ParamsError naming the values below `least`, if any; `__` in a name means a dot."""
    in_range({name: value for name, value in values.items() if value < least}, f"at least {least}")


def above_zero(**values: float) -> None:
    """Raise a ParamsError naming the values not above 0, if any; `__` in a name means a dot."""
    in_range({name: value for name, value in values.items() if not value > 0}, "above 0")


def share(**values: float) -> None:
    """Raise a ParamsError naming the values below 0 or above 1, if any; `__` in a name means a
    dot."""
    in_range({n: v for n, v in values.items() if not 0 <= v <= 1}, "from 0 to 1")


def in_range(outside: Mapping[str, float], range_: str) -> None:
    """Raise ParamsError with every value of `outside`, unless it is empty."""
    if outside:
        raise ParamsError(
            *(f"{n.replace('__', '.')} is {v}; it must be {range_}" for n, v in outside.items())
        )
