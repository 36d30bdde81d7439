"""The recipes that the experiment names: strategy, slots and settings of each."""

import ast
import dataclasses
import importlib
import typing
from collections.abc import Mapping
from typing import Any

from tasks.common import params, registry
from tasks.common.params import RECIPE_KEYS
from tasks.common.spelling import meant
from tasks.doctor.declared import declared, of
from tasks.doctor.problems import bind_problems, problems, raised
from tasks.doctor.sections import one_of, package

Values = Mapping[str, Any]
SLOTS = ("control", "generate", "select", "replay", "advantage", "loss")


def check(values: Values) -> list[str]:
    """What is wrong with the recipes of the experiment; what they share is said once."""
    experiment, recipes = values.get("experiment"), values.get("recipes")
    chosen = experiment.get("recipes") if isinstance(experiment, dict) else None
    if not isinstance(recipes, dict):
        return ["section 'recipes' is missing: name what `experiment.recipes` may run"]
    found = [
        message
        for name in (chosen if isinstance(chosen, list) else [])
        for message in recipe(values, recipes, name)
    ]
    return list(dict.fromkeys(found))


def recipe(values: Values, recipes: Values, name: Any) -> list[str]:
    """One recipe, as `allocate` and `train` would read it."""
    if name not in recipes:
        guess = meant(name, recipes)
        said = f"; did you mean {guess}?" if guess else ""
        return [f"experiment.recipes: recipe '{name}' is unknown{said} (section `recipes`)"]
    chosen, where = recipes[name], f"recipes.{name}"
    if not isinstance(chosen, dict) or set(chosen) != set(RECIPE_KEYS):
        return raised(params.recipe, values, name)
    if not all(isinstance(chosen[key], dict) for key in RECIPE_KEYS):
        return raised(params.recipe, values, name)
    return [
        *strategy(chosen["allocate"], f"{where}.allocate"),
        *training(values, chosen["train"], f"{where}.train"),
    ]


def strategy(spec: Values, where: str) -> list[str]:
    """The strategy of a recipe, and its settings."""
    strategies = package("tasks.allocate.strategies")
    unknown = one_of(f"{where}.strategy", spec.get("strategy"), registry.names(strategies))
    if unknown:
        return unknown
    module = importlib.import_module(f"{strategies.__name__}.{spec['strategy']}")
    settings = {key: value for key, value in spec.items() if key != "strategy"}
    return bind_problems(module.allocate, settings, where)


def training(values: Values, changes: Values, where: str) -> list[str]:
    """The section `train` with the recipe's keys in place of its own."""
    base, cls = values.get("train"), declared("tasks.train.settings", "TrainSettings")
    if not isinstance(base, dict):
        return []
    known, hints = [field.name for field in dataclasses.fields(cls)], typing.get_type_hints(cls)
    merged, found = {**base, **changes}, []
    for key, value in merged.items():
        place = f"{where}.{key}" if key in changes else f"train.{key}"
        if key not in known:
            if key in changes:
                guess = meant(key, known)
                said = f"; did you mean {guess}?" if guess else ""
                found.append(f"{place} is unknown; allowed: {', '.join(known)}{said}")
        elif key in SLOTS:
            found += slot(key, value, place)
        else:
            found += problems(value, hints[key], place)
    if found or set(known) - set(merged):
        return found
    return [f"{where}: {message}" for message in together(values, merged)]


def slot(name: str, spec: Any, where: str) -> list[str]:
    """The method of a slot, and its settings."""
    methods = registry.names(package(f"tasks.train.methods.{name}"))
    if not isinstance(spec, dict) or "method" not in spec:
        return [f"{where}.method is missing; there is: {', '.join(methods)}"]
    unknown = one_of(f"{where}.method", spec["method"], methods)
    if unknown:
        return unknown
    settings = {key: value for key, value in spec.items() if key != "method"}
    found = made(f"tasks.train.methods.{name}.{spec['method']}", settings, where)
    return found or environment(settings.get("environment"), f"{where}.environment")


def made(module: str, settings: Values, where: str) -> list[str]:
    """Settings against the `Settings` of a method's file, where it has some."""
    nothing = declared("tasks.train.slots", "NoSettings")
    file = of(module)
    return problems(settings, file.get("Settings") if file.has("Settings") else nothing, where)


def environment(spec: Any, where: str) -> list[str]:
    """What a conversation is held with, where a method holds one."""
    if not isinstance(spec, dict):
        return []
    known = registry.names(package("tasks.train.environments"))
    unknown = one_of(f"{where}.name", spec.get("name"), known)
    if unknown:
        return unknown
    settings = {key: value for key, value in spec.items() if key != "name"}
    return made(f"tasks.train.environments.{spec['name']}", settings, where)


def together(values: Values, merged: Values) -> list[str]:
    """What is wrong of slots and settings only together, as training finds it when it starts."""
    found = []

    def alone() -> None:
        settings = params.parse(merged, declared("tasks.train.settings", "TrainSettings"), "train")
        sections = params.sections(values, declared("tasks.train.run", "Sections"))
        declared("tasks.train.run", "check_settings")(settings, sections)

    found += raised(alone)
    selector, advantage = merged["select"]["method"], merged["advantage"]["method"]
    estimate = assigned(f"tasks.train.methods.advantage.{advantage}")
    replays = merged["replay"]["method"] != "none"
    if merged["batch"]["counts"] == "kept":
        if "keeps" not in assigned(f"tasks.train.methods.select.{selector}"):
            found.append(
                f"train.batch.counts is kept, and train.select {selector} does not keep a fixed "
                "number of every group: set generated"
            )
        if replays:
            found.append(
                "train.batch.counts is kept, and train.replay stores whole groups: set generated, "
                "or replay none"
            )
    if "skips_zeros" in estimate and merged["divisor"] != "generated":
        found.append(f"train.advantage {advantage} needs train.divisor generated")
    if "skips_zeros" in estimate and merged["kl_coefficient"] > 0:
        found.append(f"train.advantage {advantage} needs train.kl_coefficient 0")
    if "fresh_only" in estimate and replays:
        found.append(f"train.advantage {advantage} needs train.replay none")
    return found


def assigned(module: str) -> set[str]:
    """What the classes of a method's file set, but to False."""
    tree = ast.parse(of(module).file.read_bytes())
    return {
        target.attr if isinstance(target, ast.Attribute) else target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and ast.unparse(node.value) != "False"
        for target in node.targets
        if isinstance(target, ast.Attribute | ast.Name)
    }
