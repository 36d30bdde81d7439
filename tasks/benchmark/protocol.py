"""The protocol of a benchmark: families of prompts, recipes, budgets, trials and seeds, in a file
that is fixed before the runs.

A cell is one run: a family, a recipe with settings, a budget of rollouts, a seed. Its key is the
digest of all that its result depends on, the code included, so that a finished cell is never run
again, and one whose code has changed is another cell."""

import importlib
import itertools
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tasks.benchmark.keys import SECTIONS, code_of, values_of
from tasks.common import params
from tasks.common.code import ROOT
from tasks.common.files import digest
from tasks.common.params import ParamsError

Values = dict[str, Any]


@dataclass(frozen=True)
class Search:
    """How recipes are tuned: random points of `axes` (values of keys of the section `train`, common
    to all), of which `keep_share` go on from a budget to the next. There is a search for each of
    `seeds`, with points of its own; no test run has one of them."""

    axes: dict[str, list[Any]]
    keep_share: float
    seeds: list[int]


@dataclass(frozen=True)
class Contestant:
    """A recipe of the parameter file, how many settings it tries at the smallest of its budgets
    (rollouts of training), and its own main knob: a key within the recipe, such as
    `allocate.group_size`, with the values to try."""

    recipe: str
    trials: int
    budgets: list[int]
    knob: str
    values: list[Any]


@dataclass(frozen=True)
class Family:
    """What a family changes in the parameter file, and the budgets at which it is run."""

    budgets: list[int]
    changes: Values


@dataclass(frozen=True)
class Protocol:
    """The file. `title` is that of its page, `parameters` names the parameter file. The others are
    compared with the better of the recipes in `reference`, which train the same policy. `seeds` are
    those of the test runs."""

    title: str
    parameters: str
    families: dict[str, Family]
    contestants: list[Contestant]
    reference: list[str]
    search: Search
    seeds: list[int]
    num_bootstrap: int

    def budgets(self, family: str, contestant: Contestant) -> list[int]:
        """The budgets of a recipe on a family, smallest first."""
        return [b for b in contestant.budgets if b in self.families[family].budgets]

    def only(
        self, families: Collection[str] | None, recipes: Collection[str] | None = None
    ) -> "Protocol":
        """The part of it that is about these families and recipes; None: about all. Raises
        ParamsError for one that it has not."""
        compared = [contestant.recipe for contestant in self.contestants]
        for kind, asked, there in (
            ("family", families, list(self.families)),
            ("recipe", recipes, compared),
        ):
            if unknown := [name for name in asked or () if name not in there]:
                known = ", ".join(there)
                raise ParamsError(f"the protocol has no {kind} {unknown[0]}; there is: {known}")
        return replace(
            self,
            families={name: self.families[name] for name in families or self.families},
            contestants=[c for c in self.contestants if c.recipe in (recipes or compared)],
        )


@dataclass(frozen=True)
class BenchmarkCell:
    """One run: what it is, the parameters that it runs with, and by stage the digest of the code
    that it can run. `measures` is `validation` for a trial of the search and `test` for a run at
    the chosen settings."""

    family: str
    recipe: str
    budget: int
    seed: int
    measures: str
    settings: Mapping[str, Any]
    params: Mapping[str, Any]
    code: Mapping[str, str]

    @property
    def key(self) -> str:
        """The digest of all that the result depends on, the code of its stages included."""
        chosen = self.params["recipes"][self.recipe]
        what = [chosen, values_of(self.params, SECTIONS), self.code]
        return digest([self.recipe, self.budget, self.seed, self.measures, *what])

    @property
    def identity(self) -> str:
        """What the cell is within its protocol, whatever code runs it."""
        return identity_of({**vars(self), "settings": dict(self.settings)})

    @property
    def name(self) -> str:
        """For people."""
        return f"{self.family} {self.recipe} {self.budget} {self.measures} {self.seed}"


def identity_of(line: Mapping[str, Any]) -> str:
    """What a line is about, without what made it."""
    names = ("family", "recipe", "budget", "seed", "measures", "settings")
    return digest([line[name] for name in names])


def settings_of(line: Mapping[str, Any]) -> str:
    """What a test run shares with those of the other seeds, and with the trial it follows from."""
    return digest([line[name] for name in ("family", "recipe", "budget", "settings")])


def read_protocol(path: Path) -> tuple[Protocol, Values]:
    """The protocol, and the parameters it starts from. Raises ParamsError for what does not fit."""
    protocol = params.parse(params.load(path), Protocol, path.name)
    names = [contestant.recipe for contestant in protocol.contestants]
    everyone = {"recipes": [*dict.fromkeys([*names, *protocol.reference])], "seeds": [0]}
    effective = importlib.import_module("tasks.code.effective")  # by name: it is a stage's
    written = params.load(path.parent / protocol.parameters)
    values = effective.complete({**written, "experiment": everyone})
    if not protocol.reference or {*protocol.reference} - {*names} or len({*names}) < len(names):
        raise ParamsError(f"{path.name}: contestants must be distinct, the reference among them")
    owned = [contestant.budgets for contestant in protocol.contestants]
    for budgets in (*owned, *(family.budgets for family in protocol.families.values())):
        if budgets != sorted(set(budgets)) or not budgets:
            raise ParamsError(f"{path.name}: budgets {budgets} must ascend, and be some")
    for contestant in protocol.contestants:
        chosen = effective.cell_of(values, contestant.recipe)
        check_keys(path.name, protocol.search, contestant, chosen)
    if not 0 < protocol.search.keep_share <= 1:
        raise ParamsError(f"{path.name}: search.keep_share must be above 0 and at most 1")
    searches = protocol.search.seeds
    if not searches or len({*searches, *protocol.seeds}) < len(searches) + len(protocol.seeds):
        raise ParamsError(
            f"{path.name}: search.seeds must be distinct, some, and none of the seeds of the tests"
        )
    return protocol, values


def check_keys(file: str, search: Search, contestant: Contestant, recipe: Values) -> None:
    """Raise ParamsError for a key that the recipe does not have: each of its trials would fail, and
    a failure is a result."""
    for key in (*(f"train.{axis}" for axis in search.axes), contestant.knob):
        found: Any = recipe
        for part in key.split("."):
            if not isinstance(found, Mapping) or part not in found:
                raise ParamsError(f"{file}: recipe {contestant.recipe} has no key {key} to tune")
            found = found[part]


def merged(values: Mapping[str, Any], changes: Mapping[str, Any]) -> Values:
    """`values` with `changes` put in, mapping by mapping."""
    result = dict(values)
    for key, change in changes.items():
        old = result.get(key)
        both = isinstance(old, Mapping) and isinstance(change, Mapping)
        result[key] = merged(old, change) if both else change  # type: ignore[arg-type]
    return result


def dotted(key: str, value: Any) -> Values:
    """{"a": {"b": value}} for the key `a.b`."""
    for part in reversed(key.split(".")):
        value = {part: value}
    return dict(value)


def trials(search: Search, contestant: Contestant, seed: int) -> list[Values]:
    """The settings that a recipe tries first in the search of this seed: its own, then distinct
    points of the grid, drawn alike for all recipes."""
    axes = {f"train.{key}": values for key, values in search.axes.items()}
    if contestant.values:
        axes[contestant.knob] = contestant.values
    grid = [dict(zip(axes, point, strict=True)) for point in itertools.product(*axes.values())]
    order = np.random.default_rng(seed).permutation(len(grid))
    return [{}, *(grid[place] for place in order[: contestant.trials - 1].tolist())]


def survivors(num_trials: int, keep_share: float, rung: int) -> int:
    """How many trials run at the budget of this place."""
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
    """The cell with its own parameters: the family's, and one recipe, which carries the settings.
    A key of the section `train` that a recipe names is whole, so what the settings change of it is
    put into the base section's value. The code is that under `root`."""
    name, changes = family[0], family[1].changes
    changed = merged(values, changes)
    chosen = changed["recipes"][recipe]
    for key, value in settings.items():
        path = key.split(".")
        if path[0] == "train" and path[1] not in chosen["train"]:
            chosen = merged(chosen, {"train": {path[1]: changed["train"][path[1]]}})
        chosen = merged(chosen, dotted(key, value))
    changed |= {"experiment": {"recipes": [recipe], "seeds": [seed]}, "recipes": {recipe: chosen}}
    code = code_of(changed, recipe, root)
    return BenchmarkCell(name, recipe, budget, seed, measures, dict(settings), changed, code)
