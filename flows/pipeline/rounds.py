"""The request of a run, and the data roots that it brings up to date, one after the other.

A later round starts from a policy trained in the previous round: the champion of that round's
report, or a named recipe and seed. So its files are written after the previous round is done."""

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flows.pipeline import commands, health, lock, overrides, roots
from flows.pipeline.roots import MAIN, Root
from flows.pipeline.selection import SelectionError, choose
from flows.pipeline.stages import Stages
from flows.serve import status
from tasks.common import params, recipes
from tasks.common.checksums import read_checked
from tasks.common.config.editing import set_values
from tasks.common.files import write_text
from tasks.common.params import ParamsError
from tasks.common.processes import locks

logger = logging.getLogger(__name__)

CHAMPION = "champion"


@dataclass(frozen=True)
class FlowRequest:
    """The parameters of the flow (see `flows.pipeline.flow`)."""

    recipes: list[str] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)
    force: list[str] = field(default_factory=list)
    overrides: list[str] = field(default_factory=list)
    data: str = MAIN
    rounds: int = 1
    starts: list[str] = field(default_factory=list)
    concurrency: int = 1
    retries: int = 0
    until: list[str] = field(default_factory=list)

    def check(self) -> None:
        root = roots.root_of(self.data)
        if root.number > 1 and self.rounds > 1:
            raise ParamsError(
                f"--data {self.data} is a later round by itself: for several rounds use the "
                f"first, --data {root.first} --rounds {self.rounds}"
            )
        if root.number > 1 and "ingest" in self.force:
            raise ParamsError(
                f"--force ingest: {self.data} has the prompts of {root.first}; read the sources "
                f"again with `winnow run --data {root.first} --rounds {root.number} --force ingest`"
            )
        if len(self.starts) >= self.rounds:
            raise ParamsError(
                "--from sets the start of a round after the first: with --rounds "
                f"{self.rounds} there are {self.rounds - 1} of these, but it is given "
                f"{len(self.starts)} times"
            )

    @property
    def title(self) -> str:
        """Return what is requested in a line, such as `grpo, seed 0, force ingest`."""
        words = [*self.recipes, *(f"seed {seed}" for seed in self.seeds)]
        words += [f"until {stage}" for stage in self.until]
        words += [*(f"force {stage}" for stage in self.force), *self.overrides]
        words += [self.data] if self.data != MAIN else []
        words += [f"{self.rounds} rounds"] if self.rounds > 1 else []
        return ", ".join(words) or "all"

    @property
    def chain(self) -> list[Root]:
        root = roots.root_of(self.data)
        return [root, *(Root(root.first, number) for number in range(2, self.rounds + 1))]


def locked() -> AbstractContextManager[None]:
    """Return the lock of the project's pipeline, for a `with` block in which no other flow runs."""
    return locks.exclusive(status.lock_file(), "the pipeline")


@contextmanager
def opened(request: FlowRequest, experiment: Sequence[str] = ()) -> Iterator[Iterator[Stages]]:
    """Yield an iterator over the Stages of each root of the request; the caller brings one root up
    to date before it requests the next. The pipeline is locked during the block. First repair what
    a killed run left, then write the recipes in `experiment`, if any, to the parameters."""
    request.check()
    first, *later = request.chain
    check_before_waiting(first, request, experiment)
    with locked():
        status.note()
        for root in {Root(), Root(first.first), first}:  # each may be copied into the next
            overrides.put_back(root.params, overrides.note_of(root.layout))
        restore_locks(request.chain)
        if first.number == 1:
            roots.prepare_first(first)
        else:
            roots.refresh(roots.existing(first.folder))
        if experiment:
            set_recipes(first.params, experiment)
        try:
            with overrides.applied(first.params, first.layout, request.overrides):
                check_starts(params.load(first.params), request.starts)
                with commands.Dvc(is_labelled=request.concurrency > 1) as dvc:
                    yield each(dvc, request)
        finally:
            restore_locks(request.chain)
            if request.overrides:  # restored in the first round's file, now also here
                for root in later:
                    roots.refresh(root)


def restore_locks(chain: Iterable[Root]) -> None:
    with commands.whole_lock():
        for root in chain:
            lock.restore(root.lock, root.lock_copy)


def set_recipes(path: Path, names: Sequence[str]) -> None:
    """Set the experiment's recipes in the parameter file to `names`, or, if that is `all`, to every
    recipe except those that read a missing folder. Raise ParamsError for an unknown recipe."""
    names = list(dict.fromkeys(names))
    values, is_all = params.load(path), names == ["all"]
    known = recipes.names(values) if is_all else names
    read = {name: recipes.folders_of(recipes.recipe(values, name)["train"]) for name in known}
    there = [
        name
        for name, folders in read.items()
        if all((commands.ROOT / folder).is_dir() for folder in folders)
    ]
    chosen = there if is_all else names
    if chosen != params.section(values, "experiment", params.Experiment).recipes:
        write_text(path, set_values(path.read_text(), {"experiment.recipes": chosen}))
        logger.warning("%s: experiment.recipes is now %s", path.name, ", ".join(chosen))


def check_before_waiting(root: Root, request: FlowRequest, experiment: Sequence[str]) -> None:
    """Raise ParamsError or SelectionError for a name or a value of the request that is unknown or
    invalid, so that the user need not wait for the pipeline's lock to read it."""
    names = [*request.recipes, *request.seeds, *request.force, *request.until, *request.starts]
    if not (names or request.overrides or experiment):
        return
    path = root.params if root.params.exists() else Root().params
    values = overrides.values_of(path, overrides.note_of(root.layout), request.overrides)
    if experiment:
        chosen_recipes = recipes.names(values) if [*experiment] == ["all"] else [*experiment]
        for name in chosen_recipes:
            recipes.recipe(values, name)
        values["experiment"] = {**values["experiment"], "recipes": chosen_recipes}
    chosen = params.section(values, "experiment", params.Experiment)
    choose(chosen.recipes, request.recipes, "recipe")
    choose(chosen.seeds, request.seeds, "seed")
    check_starts(values, request.starts)
    known = stages_of(values)
    choose(known, request.force, "stage")
    choose([*known, *(name.partition("@")[0] for name in known)], request.until, "stage")


def stages_of(values: dict[str, Any]) -> list[str]:
    """Return the stages of the experiment: those of dvc.yaml, with a cell's once per cell."""
    stages = params.load(commands.ROOT / "dvc.yaml")["stages"]
    cells = [cell.replace("/", "-") for cell in cells_of(values)]
    return [f"{s}@{cell}" if "matrix" in stages[s] else s for s in stages for cell in cells]


def check_starts(values: dict[str, Any], starts: list[str]) -> None:
    """Raise SelectionError if the experiment does not train a policy that a round starts from."""
    cells = cells_of(values)
    for start in starts:
        if start not in (CHAMPION, *cells):
            raise SelectionError(
                f"--from {start} is not in the experiment: it has {', '.join(cells)} "
                f"(params.yaml), or {CHAMPION}"
            )


def cells_of(values: dict[str, Any]) -> list[str]:
    chosen = params.section(values, "experiment", params.Experiment)
    return [f"{recipe}/{seed}" for recipe in chosen.recipes for seed in chosen.seeds]


def each(dvc: commands.Dvc, request: FlowRequest) -> Iterator[Stages]:
    """Yield the stages of each root in turn; before each round after the first, write its files."""
    starts = [*request.starts, *[CHAMPION] * request.rounds]
    before: Stages | None = None
    for root in request.chain:
        if before:
            start = starts[before.root.number - 1]
            roots.prepare_round(root, policy_of(before, start))
        before = health.examine(dvc, root, request)
        yield before


def policy_of(before: Stages, start: str) -> str:
    """Return the folder of the policy that `start` names, for the round after `before`. Raise
    SelectionError if there is none, or if its stage is out of date but left out of this run."""
    root, after = before.root, before.root.number + 1
    if start == CHAMPION:
        if "report" in before.left_out:
            raise SelectionError(
                f"round {after} starts from the champion of round {root.number}, but its report "
                "waits for cells that are left out: run the stale ones too, or choose the policy "
                "with --from RECIPE/SEED"
            )
        start = champion_of(root)
    recipe, seed = start.rsplit("/", 1)
    stage = f"train@{recipe}-{seed}"
    if stage in before.left_out and before.behind({stage}, before.dvc):
        raise SelectionError(
            f"--from {start}: {root.titled(stage)} is out of date and left out of this run; add "
            f"`{recipe} --seed {seed}`"
        )
    folder = root.layout.train(recipe, int(seed)) / "policy"
    return folder.relative_to(commands.ROOT).as_posix()


def champion_of(root: Root) -> str:
    """Return RECIPE/SEED of the champion in the root's report, or raise SelectionError."""
    summary = read_checked(root.layout.report / "summary.json")
    if (champion := summary["champion"]) is None:
        raise SelectionError(
            f"round {root.number} has no champion: {summary['why']}. Choose the start of round "
            f"{root.number + 1} with --from RECIPE/SEED: there are "
            f"{', '.join(cells_of(params.load(root.params)))}"
        )
    return f"{champion['recipe']}/{champion['seed']}"
