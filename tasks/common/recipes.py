"""Recipes by name: a file of `recipes/`, or a key under `recipes` in params.yaml.

A recipe has `allocate` (its strategy) and `train` (what differs from the section `train`; a slot
that it names replaces the section's whole). With `from: NAME` it is the recipe NAME with its own
values merged in, key by key; another method of a slot, or another strategy, replaces the whole
mapping. A recipe of params.yaml takes precedence over a file of the same name; without a strategy
or `from` it is made from that file, so an override of one of its keys changes the built-in one."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tasks.common import params
from tasks.common.params import ParamsError, unknown

FOLDER = Path(__file__).resolve().parent.parent.parent / "recipes"
KEYS = ("from", "allocate", "train")
CHOICES = ("method", "strategy")
"""Keys that say what the other keys of a mapping are about."""

Recipe = dict[str, Any]


def names(values: Mapping[str, Any]) -> list[str]:
    """The recipes that params.yaml may name: the built-in ones, then its own."""
    own = own_recipes(values)
    return sorted({path.stem for path in FOLDER.glob("*.yaml")} - {*own}) + list(own)


def own_recipes(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """The section `recipes`. Raises ParamsError where it is no mapping."""
    own = values.get("recipes")
    if own is not None and not isinstance(own, dict):
        raise ParamsError(f"recipes must be a mapping of names to recipes; it is {own!r}")
    return own or {}


def describe(name: str) -> str:
    """What a built-in recipe is, and its paper, as its file begins; nothing where there is none."""
    path = FOLDER / f"{name}.yaml"
    lines = path.read_text().splitlines()[:2] if path.exists() else []
    return " ".join(line.removeprefix("# ") for line in lines)


def recipe(values: Mapping[str, Any], name: str) -> Recipe:
    """The recipe `name`: `allocate`, and `train` as the base section with the recipe's keys
    replaced. Raises ParamsError where there is none, or where it is none."""
    found = resolved(values, name)
    base = values.get("train") or {}
    if not isinstance(base, dict):
        raise ParamsError(f"train must be a mapping; it is {base!r}")
    changes = {key: over(base.get(key), value) for key, value in found["train"].items()}
    return {**found, "train": {**base, **changes}}


def of_cell(values: Mapping[str, Any], name: str, folder: Path) -> Recipe:
    """The recipe with all that it runs with, as the stage `code` left it in `folder`; without that
    as `recipe`."""
    found = recipe(values, name)
    for key in ("allocate", "train"):
        path = folder / name / f"{key}.params.yaml"
        if path.exists():
            found[key] = params.load(path)[key]
    return found


def over(base: Any, value: Any) -> Any:
    """A key of the section `train` as a recipe changes it: a slot is replaced, other mappings are
    merged."""
    is_slot = isinstance(value, dict) and "method" in value
    return merged(base, value) if are_alike(base, value) and not is_slot else value


def resolved(values: Mapping[str, Any], name: str, above: tuple[str, ...] = ()) -> Recipe:
    """The recipe's own `allocate` and `train`, with those of the recipes it is made from. `above`
    are the recipes that are made from it."""
    where, file = f"recipes.{name}", FOLDER / f"{name}.yaml"
    is_own = name in own_recipes(values) and name not in above
    if name in above and (not file.exists() or above.count(name) > 1):
        raise ParamsError(f"{where} is made from itself: {' from '.join((*above, name))}")
    if name not in names(values):
        by = f"recipes.{above[-1]}.from: " if above else ""
        raise ParamsError(unknown(f"{by}recipe '{name}' is unknown; there is", name, names(values)))
    found = own_recipes(values)[name] if is_own else params.load(file)
    if is_own and file.exists() and is_part(found):
        found = {"from": name, **found}
    check(found, where)
    changes = {key: found.get(key) or {} for key in ("allocate", "train")}
    if "from" not in found:
        return changes
    return merged(resolved(values, found["from"], (*above, name)), changes)


def is_part(found: Any) -> bool:
    """Whether a recipe has neither a strategy nor another recipe that it is made from."""
    if not isinstance(found, dict) or "from" in found:
        return False
    allocate = found.get("allocate")
    return allocate is None or (isinstance(allocate, dict) and "strategy" not in allocate)


def check(found: Any, where: str) -> None:
    """Raise ParamsError unless a recipe is made of the mappings that it can have."""
    if not isinstance(found, dict):
        raise ParamsError(f"{where} must be a mapping with allocate and train; it is {found!r}")
    if wrong := [key for key in found if key not in KEYS]:
        raise ParamsError(unknown(f"{where}.{wrong[0]} is unknown; allowed", wrong[0], KEYS))
    if "from" not in found and "allocate" not in found:
        raise ParamsError(f"{where} has no allocate: name a strategy, or a recipe with `from`")
    for key in ("allocate", "train"):
        if not isinstance(found.get(key) or {}, dict):
            raise ParamsError(f"{where}.{key} must be a mapping; it is {found[key]!r}")


def merged(base: Any, changes: Mapping[str, Any]) -> dict[str, Any]:
    """`base` with `changes` put in, mapping by mapping; one with another method or strategy is
    replaced whole."""
    result = dict(base)
    for key, change in changes.items():
        old = result.get(key)
        result[key] = merged(old, change) if are_alike(old, change) else change
    return result


def are_alike(old: Any, new: Any) -> bool:
    """Whether two values are mappings about the same thing."""
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return False
    return all(new.get(key, old.get(key)) == old.get(key) for key in CHOICES)
