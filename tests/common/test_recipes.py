"""Recipes by name: files, and the user's own."""

import importlib
import itertools
from typing import Any

import pytest

from tasks.allocate import strategies
from tasks.common import params, recipes, registry
from tasks.common.params import ParamsError
from tasks.train.settings import SLOTS
from tests.parameters import every_value

OWN: dict[str, Any] = {
    "plain": {"allocate": {"strategy": "uniform", "group_size": 8}},
    "slots": {"from": "plain", "train": {"loss": {"method": "tis"}, "batch": {"size": 8}}},
    "more": {"from": "slots", "allocate": {"group_size": 2}, "train": {"loss": {"cap": 1}}},
    "other": {"from": "more", "allocate": {"strategy": "band"}, "train": {"loss": {"method": "a"}}},
}
BASE = {"loss": {"method": "clip", "clip_low": 0.2}, "batch": {"unit": "prompts", "size": 4}}
VALUES = {"train": BASE, "recipes": OWN}


def test_recipe_replaces_slots_and_merges_the_rest() -> None:
    train = recipes.recipe(VALUES, "slots")["train"]
    assert train == {"loss": {"method": "tis"}, "batch": {"unit": "prompts", "size": 8}}
    assert recipes.recipe(VALUES, "plain")["train"] == BASE


def test_from_merges_keys_and_replaces_methods_and_strategies() -> None:
    more, other = recipes.resolved(VALUES, "more"), recipes.resolved(VALUES, "other")
    assert more["allocate"] == {"strategy": "uniform", "group_size": 2}
    assert more["train"] == {"loss": {"method": "tis", "cap": 1}, "batch": {"size": 8}}
    assert other["allocate"] == {"strategy": "band"}
    assert other["train"]["loss"] == {"method": "a"}


def test_recipe_of_the_parameters_takes_precedence() -> None:
    own = {"recipes": {"mine": {"from": "sgpo", "allocate": {"unsolved_rate": 0.25}}}}
    built_in = recipes.resolved({}, "sgpo")["allocate"]
    assert recipes.resolved(own, "mine")["allocate"] == {**built_in, "unsolved_rate": 0.25}
    changed = {"recipes": {"sgpo": {"allocate": {"strategy": "uniform", "group_size": 3}}}}
    assert recipes.resolved(changed, "sgpo")["allocate"]["group_size"] == 3
    assert recipes.names(own)[-1] == "mine"


@pytest.mark.parametrize("base", [{}, {"from": "pods"}])
def test_partial_recipe_changes_the_built_in_one(base: dict[str, str]) -> None:
    built_in, part = recipes.resolved({}, "pods"), {"allocate": {"group_size": 32}}
    changed = recipes.resolved({"recipes": {"pods": {**base, **part}}}, "pods")
    group_size = {"allocate": {**built_in["allocate"], "group_size": 32}}
    assert changed == {**built_in, **group_size}
    derived = recipes.resolved({"recipes": {"pods": part}}, "pods_random")  # derived from pods
    assert derived["allocate"]["group_size"] == 32
    whole = {"allocate": {"strategy": "uniform", "group_size": 2}}
    assert recipes.resolved({"recipes": {"pods": whole}}, "pods") == {**whole, "train": {}}


@pytest.mark.parametrize(
    ("recipe", "message"),
    [
        ({"allocate": {}, "sampling": {}}, "recipes.r.sampling is unknown; allowed: from, allocat"),
        ({"train": {}}, "recipes.r has no allocate: name a strategy, or a recipe with `from`"),
        ({"allocate": 3}, "recipes.r.allocate must be a mapping"),
        ({"from": "sgop"}, "recipes.r.from: recipe 'sgop' is unknown; .* did you mean sgpo?"),
        ({"from": "r"}, "recipes.r extends itself: r from r"),
        (3, "recipes.r must be a mapping with allocate and train"),
        (None, "recipes.r must be a mapping with allocate and train; it is None"),
    ],
)
def test_invalid_recipe_is_refused(recipe: Any, message: str) -> None:
    with pytest.raises(ParamsError, match=message):
        recipes.recipe({"recipes": {"r": recipe}}, "r")


@pytest.mark.parametrize("name", recipes.names({}))
def test_file_begins_with_description_and_paper(name: str) -> None:
    path = recipes.files()[name]
    description, paper, first, *_ = path.read_text().splitlines()
    assert description.startswith("# ")
    assert description.endswith(".")
    assert paper.startswith("# ")
    assert not first.startswith("#")
    params.check_recipe(name, path.name)


def test_budget_adds_branches_by_default() -> None:
    """The file, a recipe and a missing budget take precedence over these defaults."""
    budget = {"account": "executed", "amount": 4e11}
    values = {"experiment": {"budget": budget}, "train": {"learning_rate": 1e-4}}
    train = recipes.recipe(values, "grpo")["train"]
    assert (train["decay_share"], train["branches"]) == (0.2, [0.25, 0.5])
    own = {"from": "grpo", "train": {"decay_share": 0.3}}
    values |= {"train": {"branches": [0.5]}, "recipes": {"own": own}}
    train = recipes.recipe(values, "own")["train"]
    assert (train["decay_share"], train["branches"]) == (0.3, [0.5])
    values |= {"experiment": {"budget": None}, "train": {}}
    assert "branches" not in recipes.recipe(values, "grpo")["train"]


OF_USERS = {"multi_turn", "runs"}  # they need an environment and finished runs


def test_every_method_has_a_recipe() -> None:
    project = every_value()
    trains = [{**project["train"], **each["train"]} for each in project["recipes"].values()]
    for slot in (*SLOTS, "shape"):
        package = importlib.import_module(f"tasks.train.methods.{slot}")
        values = [train[slot] for train in trains]
        methods = itertools.chain(*values) if slot == "shape" else values
        used = {method["method"] for method in methods}
        assert {*registry.names(package)} - used <= OF_USERS, slot
    used = {each["allocate"]["strategy"] for each in project["recipes"].values()}
    assert used == {*registry.names(strategies)}
