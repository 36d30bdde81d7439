"""The protocol of a benchmark: families of prompts, recipes, budgets, trials and seeds, in a file
that is fixed before the runs.

A cell is one run: a family, a recipe with settings, a budget of rollouts, a seed. Its key is the
digest of all inputs of its result, including the code. A finished cell is never run again, and a
cell with changed code is a new cell."""

import itertools
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from flows.benchmark.keys import inputs_of
from flows.benchmark.results import MAX_COUNT
from tasks.code import effective
from tasks.common import params
from tasks.common.code import ROOT
from tasks.common.files import digest
from tasks.common.params import ParamsError
from tasks.common.recipes import merged

Values = dict[str, Any]


@dataclass(frozen=True)
class Search:
    """How recipes are tuned: random points of the common `axes` (keys of the section `train`, with
    their values). A share `keep_share` of the points continues from one budget to the next. There
    is one search for each of `seeds`, with its own points; no test run uses these seeds."""

    axes: dict[str, list[Any]]
    keep_share: float
    seeds: list[int]


@dataclass(frozen=True)
class Contestant:
    """A recipe of the parameter file, the number of settings to try at the smallest of its budgets
    (rollouts of training), and its own main knob: a key within the recipe, such as
    `allocate.group_size`, with the values to try."""

    recipe: str
    trials: int
    budgets: list[int]
    knob: str
    values: list[Any]


@dataclass(frozen=True)
class Family:
    """A family of prompts: its budgets in rollouts, and its changes to the parameter file."""

    budgets: list[int]
    changes: Values


@dataclass(frozen=True)
class Protocol:
    """The content of a protocol file. `title` is the title of its page, `parameters` the parameter
    file, to which `recipes` are added. Recipes are compared with the best one of those in
    `reference`, which must all train the same policy. `seeds` are the seeds of the test runs."""

    title: str
    parameters: str
    families: dict[str, Family]
    contestants: list[Contestant]
    reference: list[str]
    search: Search
    seeds: list[int]
    recipes: Values = field(default_factory=dict)

    def budgets(self, family: str, contestant: Contestant) -> list[int]:
        return [b for b in contestant.budgets if b in self.families[family].budgets]

    def only(
        self, families: Collection[str] | None, recipes: Collection[str] | None = None
    ) -> "Protocol":
        """Return the part of the protocol for these families and recipes; None means all. Raise
        ParamsError for unknown names."""
        compared = [contestant.recipe for contestant in self.contestants]
        for kind, requested, there in (
            ("family", families, list(self.families)),
            ("recipe", recipes, compared),
        ):
            if unknown := [name for name in requested or () if name not in there]:
                known = ", ".join(there)
                raise ParamsError(f"the protocol has no {kind} {unknown[0]}; use: {known}")
        return replace(
            self,
            families={name: self.families[name] for name in families or self.families},
            contestants=[c for c in self.contestants if c.recipe in (recipes or compared)],
        )


@dataclass(frozen=True)
class BenchmarkCell:
    """One run: its identity, its parameters, and by stage the digests of the values that can change
    its result and of the code that it can run. `measures` is `validation` for a trial of the search
    and `test` for a run at the chosen settings."""

    family: str
    recipe: str
    budget: int
    seed: int
    measures: str
    settings: Mapping[str, Any]
    params: Mapping[str, Any]
    values: Mapping[str, str]
    code: Mapping[str, str]

    @property
    def key(self) -> str:
        """The digest of all inputs of the result, including the code of its stages."""
        what = [self.recipe, self.budget, self.seed, self.measures, self.values, self.code]
        return digest(what)

    @property
    def identity(self) -> str:
        """A digest of the cell's place in the protocol, independent of the code."""
        return identity_of({**vars(self), "settings": dict(self.settings)})

    @property
    def name(self) -> str:
        return f"{self.family} {self.recipe} {self.budget} {self.measures} {self.seed}"


def identity_of(line: Mapping[str, Any]) -> str:
    """Return the digest `BenchmarkCell.identity` for the fields of a result line."""
    names = ("family", "recipe", "budget", "seed", "measures", "settings")
    return digest([line[name] for name in names])


def settings_of(line: Mapping[str, Any]) -> str:
    """Return a key of a line's settings: equal for a trial and its test runs with all seeds."""
    return digest([line[name] for name in ("family", "recipe", "budget", "settings")])


def read_protocol(path: Path) -> tuple[Protocol, Values]:
    """Return the protocol and the complete parameters. Raise ParamsError for invalid content."""
    protocol = params.parse(params.load(path), Protocol, path.name)
    names = [contestant.recipe for contestant in protocol.contestants]
    everyone = {"recipes": [*dict.fromkeys([*names, *protocol.reference])], "seeds": [0]}
    written = params.load(path.parent / protocol.parameters)
    whole = merged({**written, "experiment": everyone}, {"recipes": protocol.recipes})
    values = effective.complete(whole)
    if not protocol.reference or {*protocol.reference} - {*names} or len({*names}) < len(names):
        raise ParamsError(f"{path.name}: contestants must be distinct, the reference among them")
    owned = [contestant.budgets for contestant in protocol.contestants]
    for budgets in (*owned, *(family.budgets for family in protocol.families.values())):
        if budgets != sorted(set(budgets)) or not budgets:
            raise ParamsError(f"{path.name}: budgets {budgets} must ascend, with at least one")
    for name, family in protocol.families.items():
        num_samples = effective.complete(merged(whole, family.changes))["evaluate"]["num_samples"]
        if num_samples > MAX_COUNT:
            raise ParamsError(
                f"{path.name}: family {name} has evaluate.num_samples {num_samples}; a result line "
                f"has room for {MAX_COUNT}: set it to at most {MAX_COUNT}"
            )
    for contestant in protocol.contestants:
        settings = effective.cell_of(values, contestant.recipe)
        check_keys(path.name, protocol.search, contestant, settings)
    if not 0 < protocol.search.keep_share <= 1:
        raise ParamsError(f"{path.name}: search.keep_share must be above 0 and at most 1")
    searches = protocol.search.seeds
    if min([0, *searches, *protocol.seeds]) < 0:
        raise ParamsError(f"{path.name}: seeds must be at least 0")
    if len(protocol.seeds) < 2:
        raise ParamsError(f"{path.name}: seeds needs at least two, for intervals over seeds")
    if not searches or len({*searches, *protocol.seeds}) < len(searches) + len(protocol.seeds):
        raise ParamsError(
            f"{path.name}: search.seeds needs distinct seeds, none of them a seed of the tests"
        )
    return protocol, values


def check_keys(file: str, search: Search, contestant: Contestant, recipe: Values) -> None:
    """Raise ParamsError for a key to tune that the recipe lacks, because each trial that sets the
    key would fail, and a failure counts as a result."""
    for key in (*(f"train.{axis}" for axis in search.axes), contestant.knob):
        found: Any = recipe
        for part in key.split("."):
            if not isinstance(found, Mapping) or part not in found:
                raise ParamsError(f"{file}: recipe {contestant.recipe} has no key {key} to tune")
            found = found[part]


def dotted(key: str, value: Any) -> Values:
    """Return {"a": {"b": value}} for the key `a.b`."""
    for part in reversed(key.split(".")):
        value = {part: value}
    return dict(value)


def trials(search: Search, contestant: Contestant, seed: int) -> list[Values]:
    """Return the settings that a recipe tries first in this seed's search: {} (its own values),
    then distinct random points of its grid, the same for recipes with the same grid."""
    axes = {f"train.{key}": values for key, values in search.axes.items()}
    if contestant.values:
        axes[contestant.knob] = contestant.values
    grid = [dict(zip(axes, point, strict=True)) for point in itertools.product(*axes.values())]
    order = np.random.default_rng(seed).permutation(len(grid))
    return [{}, *(grid[place] for place in order[: contestant.trials - 1].tolist())]


def survivors(num_trials: int, keep_share: float, rung: int) -> int:
    """Return the number of trials that run at the budget with index `rung`."""
    return max(math.ceil(num_trials * keep_share**rung), 1)


def make_cell(
    values: Mapping[str, Any],
    family: tuple[str, Family],
    recipe: str,
    budget: int,
    seed: int,
    measures: str,
    settings: Mapping[str, Any],
    root: Path = ROOT,
) -> BenchmarkCell:
    """Return the cell with its own parameters: those of the family, with one recipe that contains
    the settings. A key in a recipe's `train` replaces the whole base value, so partial settings are
    first merged into the base value. The code is under `root`."""
    name, changes = family[0], family[1].changes
    changed = merged(values, changes)
    own = changed["recipes"][recipe]
    for key, value in settings.items():
        path = key.split(".")
        if path[0] == "train" and path[1] not in own["train"]:
            own = merged(own, {"train": {path[1]: changed["train"][path[1]]}})
        own = merged(own, dotted(key, value))
    changed |= {"experiment": {"recipes": [recipe], "seeds": [seed]}, "recipes": {recipe: own}}
    inputs = inputs_of(changed, recipe, root)
    return BenchmarkCell(name, recipe, budget, seed, measures, dict(settings), changed, *inputs)
