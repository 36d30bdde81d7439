"""The request of a run, and the block in which its data root is brought up to date."""

import logging
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flows.doctor import health
from flows.pipeline import commands, lock, overrides, roots, status
from flows.pipeline.roots import MAIN, Root
from flows.pipeline.selection import choose
from flows.pipeline.stages import Stages
from tasks.common import params, recipes
from tasks.common.config.editing import set_values
from tasks.common.files import write_text
from tasks.common.processes import locks

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class FlowRequest:
    """The parameters of the flow (see `flows.pipeline.flow`)."""

    recipes: list[str] = field(default_factory=list)
    seeds: list[int] = field(default_factory=list)
    force: list[str] = field(default_factory=list)
    overrides: list[str] = field(default_factory=list)
    data: str = MAIN
    concurrency: int = 1
    retries: int = 0
    until: list[str] = field(default_factory=list)

    @property
    def title(self) -> str:
        """Return what is requested in a line, such as `grpo, seed 0, force ingest`."""
        words = [*self.recipes, *(f"seed {seed}" for seed in self.seeds)]
        words += [f"until {stage}" for stage in self.until]
        words += [*(f"force {stage}" for stage in self.force), *self.overrides]
        words += [self.data] if self.data != MAIN else []
        return ", ".join(words) or "all"


def locked() -> AbstractContextManager[None]:
    """Return the lock of the project's pipeline, for a `with` block in which no other flow runs."""
    return locks.exclusive(status.lock_file(), "the pipeline")


@contextmanager
def opened(request: FlowRequest, experiment: Sequence[str] = ()) -> Iterator[Stages]:
    """Yield the Stages of the request's data root. The pipeline is locked during the block. First
    repair what a killed run left, then write the recipes in `experiment`, if any, to the
    parameters."""
    root = roots.root_of(request.data)
    check_before_waiting(root, request, experiment)
    with locked():
        status.note()
        for one in {Root(), root}:  # the first is copied into a new root
            overrides.put_back(one.params, overrides.note_of(one.layout))
        restore_lock(root)
        roots.prepare(root)
        if experiment:
            set_recipes(root.params, experiment)
        try:
            with (
                overrides.applied(root.params, root.layout, request.overrides),
                commands.Dvc(is_labelled=request.concurrency > 1) as dvc,
            ):
                yield health.examine(dvc, root, request)
        finally:
            restore_lock(root)


def restore_lock(root: Root) -> None:
    with commands.whole_lock():
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
    selected = there if is_all else names
    if selected != params.section(values, "experiment", params.Experiment).recipes:
        write_text(path, set_values(path.read_text(), {"experiment.recipes": selected}))
        logger.warning("%s: experiment.recipes is now %s", path.name, ", ".join(selected))


def check_before_waiting(root: Root, request: FlowRequest, experiment: Sequence[str]) -> None:
    """Raise ParamsError or SelectionError for a name or a value of the request that is unknown or
    invalid, so that the user need not wait for the pipeline's lock to read it."""
    names = [*request.recipes, *request.seeds, *request.force, *request.until]
    if not (names or request.overrides or experiment):
        return
    path = root.params if root.params.exists() else Root().params
    values = overrides.values_of(path, overrides.note_of(root.layout), request.overrides)
    if experiment:
        selected = recipes.names(values) if [*experiment] == ["all"] else [*experiment]
        for name in selected:
            recipes.recipe(values, name)
        values["experiment"] = {**values["experiment"], "recipes": selected}
    section = params.section(values, "experiment", params.Experiment)
    choose(section.recipes, request.recipes, "recipe")
    choose(section.seeds, request.seeds, "seed")
    known = stages_of(values)
    choose(known, request.force, "stage")
    choose([*known, *(name.partition("@")[0] for name in known)], request.until, "stage")


def stages_of(values: dict[str, Any]) -> list[str]:
    """Return the stages of the experiment: those of dvc.yaml, with a cell's once per cell."""
    stages = params.load(commands.ROOT / "dvc.yaml")["stages"]
    cells = [cell.replace("/", "-") for cell in cells_of(values)]
    return [f"{s}@{cell}" if "matrix" in stages[s] else s for s in stages for cell in cells]


def cells_of(values: dict[str, Any]) -> list[str]:
    experiment = params.section(values, "experiment", params.Experiment)
    return [f"{recipe}/{seed}" for recipe in experiment.recipes for seed in experiment.seeds]
