"""Recipes by name: a file of `recipes/` or its folders, or a key under `recipes` in params.yaml.

A recipe has `allocate` (its strategy) and `train` (its differences from the section `train`; a slot
with a method replaces the section's whole slot). With `from: NAME` it is the recipe NAME with these
values merged in, key by key, except that a slot with a different method, or a different strategy,
replaces the whole mapping. A recipe in params.yaml takes precedence over a file of the same name;
without a strategy or `from` it extends that file, so it need only set the keys that differ."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tasks.common import params
from tasks.common.files import digest_folder
from tasks.common.params import ParamsError, unknown

FOLDER = Path(__file__).resolve().parent.parent.parent / "recipes"
KEYS = ("from", "allocate", "train")
CHOICES = ("method", "strategy")
"""Keys that determine the meaning of the other keys of a mapping."""
POINTS = {"decay_share": 0.2, "branches": [0.25, 0.5]}  # defaults of `train` with a budget

Recipe = dict[str, Any]


def names(values: Mapping[str, Any]) -> list[str]:
    """Return the recipes that params.yaml may name: the built-in ones, then its own."""
    own = own_recipes(values)
    return sorted({*files()} - {*own}) + list(own)


def files() -> dict[str, Path]:
    """Return the files of the built-in recipes by name."""
    return {path.stem: path for path in FOLDER.rglob("*.yaml")}


def own_recipes(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the section `recipes`. Raise ParamsError if it is not a mapping."""
    own = values.get("recipes")
    if own is not None and not isinstance(own, dict):
        raise ParamsError(f"recipes must be a mapping of names to recipes; it is {own!r}")
    return own or {}


def describe(name: str) -> str:
    """Return the description and paper of a built-in recipe from its file, or an empty string."""
    path = files().get(name)
    lines = path.read_text().splitlines()[:2] if path else []
    return " ".join(line.removeprefix("# ") for line in lines)


def recipe(values: Mapping[str, Any], name: str) -> Recipe:
    """Return the recipe `name`: `allocate`, and `train` as the base section with the recipe's keys
    merged in (see `over`). Raise ParamsError if it is unknown or invalid."""
    own, base = resolved(values, name), base_train(values)
    changes = {key: over(base.get(key), value) for key, value in own["train"].items()}
    return {**own, "train": {**base, **changes}}


def base_train(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the section `train`, with the defaults POINTS if `experiment.budget` is set."""
    base, experiment = values.get("train") or {}, values.get("experiment")
    if not isinstance(base, dict):
        raise ParamsError(f"train must be a mapping; it is {base!r}")
    has_budget = isinstance(experiment, dict) and experiment.get("budget") is not None
    return {**(POINTS if has_budget else {}), **base}


def runs_of(train: Mapping[str, Any]) -> list[Path]:
    """Return the folders of the finished runs whose rollouts a section `train` replays."""
    replay = train.get("replay") or {}
    named = replay.get("folders", []) if replay.get("method") == "runs" else []
    return [Path(folder).expanduser() for folder in named]


def folders_of(train: Mapping[str, Any]) -> list[Path]:
    """Return the folders outside the pipeline that a section `train` names."""
    teacher = (train.get("reference") or {}).get("source")
    return runs_of(train) + ([] if teacher is None else [Path(teacher).expanduser()])


def input_digests(train: Mapping[str, Any]) -> dict[str, Any]:
    """Return, as `inputs`, the digest of each folder of `folders_of` that exists on this machine,
    since its files determine the trained policy; empty if there are none."""
    there = [folder for folder in folders_of(train) if folder.is_dir()]
    found = {str(folder): digest_folder(folder, ("*",)) for folder in there}
    return {"inputs": found} if found else {}


def over(base: Any, value: Any) -> Any:
    """Return the value of a key of `train` after a recipe's change: `value` merged into `base` if
    both are mappings, else `value`. A slot (a `value` with a method) is never merged."""
    is_slot = isinstance(value, dict) and "method" in value
    return merged(base, value) if are_alike(base, value) and not is_slot else value


def resolved(values: Mapping[str, Any], name: str, above: tuple[str, ...] = ()) -> Recipe:
    """Return the recipe's own `allocate` and `train`, merged into those of the recipes that it
    extends. `above` are the recipes that extend it."""
    where, file = f"recipes.{name}", files().get(name)
    is_own = name in own_recipes(values) and name not in above
    if name in above and (file is None or above.count(name) > 1):
        raise ParamsError(f"{where} extends itself: {' from '.join((*above, name))}")
    if name not in names(values):
        by = f"recipes.{above[-1]}.from: " if above else ""
        raise ParamsError(unknown(f"{by}recipe '{name}' is unknown; use", name, names(values)))
    own = params.load(file) if file and not is_own else own_recipes(values)[name]
    if is_own and file and is_part(own):
        own = {"from": name, **own}
    check(own, where)
    changes = {key: own.get(key) or {} for key in ("allocate", "train")}
    if "from" not in own:
        return changes
    return merged(resolved(values, own["from"], (*above, name)), changes)


def is_part(own: Any) -> bool:
    """Return whether a recipe only changes a built-in one: it has neither a strategy nor `from`."""
    if not isinstance(own, dict) or "from" in own:
        return False
    allocate = own.get("allocate")
    return allocate is None or (isinstance(allocate, dict) and "strategy" not in allocate)


def check(own: Any, where: str) -> None:
    """Raise ParamsError unless a recipe has only the allowed keys, each with a mapping."""
    if not isinstance(own, dict):
        raise ParamsError(f"{where} must be a mapping with allocate and train; it is {own!r}")
    if wrong := [key for key in own if key not in KEYS]:
        raise ParamsError(unknown(f"{where}.{wrong[0]} is unknown; allowed", wrong[0], KEYS))
    if "from" not in own and "allocate" not in own:
        raise ParamsError(f"{where} has no allocate: name a strategy, or a recipe with `from`")
    for key in ("allocate", "train"):
        if not isinstance(own.get(key) or {}, dict):
            raise ParamsError(f"{where}.{key} must be a mapping; it is {own[key]!r}")


def merged(base: Any, changes: Mapping[str, Any]) -> dict[str, Any]:
    """Return `base` with `changes` merged in, mapping by mapping. A mapping with another method or
    strategy is replaced entirely."""
    result = dict(base)
    for key, change in changes.items():
        old = result.get(key)
        result[key] = merged(old, change) if are_alike(old, change) else change
    return result


def are_alike(old: Any, new: Any) -> bool:
    """Return whether two mappings have the same method and strategy, so that they can be merged."""
    if not (isinstance(old, dict) and isinstance(new, dict)):
        return False
    return all(new.get(key, old.get(key)) == old.get(key) for key in CHOICES)
