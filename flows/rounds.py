"""What a run is asked for, and the data roots that it brings up to date, one after the other.

A later round starts from a policy that the round before it trained: the champion of that round's
report, or a recipe and seed by name. So its files are made when the round before it is done."""

import argparse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flows import commands, doctor, experiment, overrides, roots
from flows.roots import MAIN, Root
from flows.selection import SelectionError
from flows.stages import Stages
from tasks.common import params, process
from tasks.common.params import ParamsError
from tasks.common.sealed import read_sealed

CHAMPION = "champion"


@dataclass(frozen=True)
class FlowRequest:
    """What a run is asked for: some recipes and seeds, stages to force, values of params.yaml, a
    data root, how many rounds, what each round after the first starts from, and how many stages may
    run side by side."""

    recipes: list[str]
    seeds: list[str]
    force: list[str]
    overrides: list[str]
    data: str = MAIN
    rounds: int = 1
    starts: tuple[str, ...] = ()
    concurrency: int = 1

    def check(self) -> None:
        """Raise ParamsError for what makes no sense, whatever is in params.yaml."""
        params.at_least(1, rounds=self.rounds)
        root = roots.root_of(self.data)
        if root.number > 1 and self.rounds > 1:
            raise ParamsError(
                f"--data {self.data} is a later round by itself: for several rounds name the "
                f"first, --data {root.first} --rounds {self.rounds}"
            )
        if len(self.starts) >= self.rounds:
            raise ParamsError(
                "--from names what a round after the first starts from: with --rounds "
                f"{self.rounds} there are {self.rounds - 1} of them, and it is given "
                f"{len(self.starts)} times"
            )

    @property
    def chain(self) -> list[Root]:
        """The roots of the run, in order."""
        root = roots.root_of(self.data)
        return [root, *(Root(root.first, number) for number in range(2, self.rounds + 1))]


def request_of(options: argparse.Namespace) -> FlowRequest:
    """What a command line asks for."""
    return FlowRequest(
        options.recipe or [],
        [str(seed) for seed in options.seed or []],
        options.force or [],
        getattr(options, "overrides", []),
        options.data,
        options.rounds,
        tuple(getattr(options, "starts", None) or ()),
        getattr(options, "concurrency", 1),
    )


def add_options(parser: argparse.ArgumentParser, *, starts: bool = True) -> None:
    """The options that say which data roots a command is about, and what later rounds start
    from."""
    roots.add_option(parser)
    parser.add_argument(
        "--rounds",
        type=int,
        default=1,
        help="how many rounds; a later one starts from the champion",
    )
    if not starts:
        return
    parser.add_argument(
        "--from",
        dest="starts",
        action="append",
        metavar="RECIPE/SEED",
        help="what the second round starts from, instead of the champion; repeated, the third, ...",
    )


@contextmanager
def opened(request: FlowRequest, recipes: str | None = None) -> Iterator[Iterator[Stages]]:
    """The stages of each root of the request, to be brought up to date before the next is asked
    for; meanwhile no other flow runs in this project. `recipes` are first set in the parameters."""
    request.check()
    first, *later = request.chain
    with process.exclusive(Root().layout.locks / "pipeline", "the pipeline"):
        prepare(first)
        set_recipes(first, recipes)
        try:
            with overrides.applied(first.params, first.layout, request.overrides):
                check_starts(first.params, request.starts)
                with commands.Dvc(is_labelled=request.concurrency > 1) as dvc:
                    yield each(dvc, request)
        finally:
            if request.overrides:  # they are gone from the first round's file, and now from these
                for root in later:
                    roots.refresh(root)


def prepare(root: Root) -> None:
    """The files of the root with which a run begins."""
    if root.number == 1:
        roots.prepare_first(root)
    else:
        roots.refresh(roots.existing(root.folder))


def set_recipes(root: Root, words: str | None) -> None:
    """Write the experiment's recipes into the parameters, once what a killed run left there is
    undone and while no other run has values of its own in it."""
    if words:
        overrides.put_back(root.params, overrides.note_of(root.layout))
        experiment.set_recipes(root.params, words)


def check_starts(path: Path, starts: tuple[str, ...]) -> None:
    """Raise SelectionError for one that no round can start from, before anything is run."""
    cells = cells_of(params.load(path))
    for start in starts:
        if start not in (CHAMPION, *cells):
            raise SelectionError(
                f"--from {start} is not in the experiment: it has {', '.join(cells)} "
                f"({path.name}), or {CHAMPION}"
            )


def cells_of(values: dict[str, Any]) -> list[str]:
    chosen = params.section(values, "experiment", params.Experiment)
    return [f"{recipe}/{seed}" for recipe in chosen.recipes for seed in chosen.seeds]


def each(dvc: commands.Dvc, request: FlowRequest) -> Iterator[Stages]:
    """The roots one after the other. The files of a later round are made when it is asked for."""
    starts = [*request.starts, *[CHAMPION] * request.rounds]
    before: Stages | None = None
    for root in request.chain:
        if before:
            start = starts[before.root.number - 1]
            roots.prepare_round(root, policy_of(before, start))
        before = doctor.examine(dvc, root, request.recipes, request.seeds, request.force)
        yield before


def policy_of(before: Stages, start: str) -> str:
    """The folder of the policy that the round after `before` starts from. Raises SelectionError
    where there is none, or where it is out of date and was left out of this run."""
    root, after = before.root, before.root.number + 1
    if start == CHAMPION:
        if "report" in before.left_out:
            raise SelectionError(
                f"round {after} starts from the champion of round {root.number}, and its report "
                "waits for cells that are left out: leave no stale ones out, or name the policy "
                "with --from RECIPE/SEED"
            )
        start = champion_of(root)
    recipe, seed = start.rsplit("/", 1)
    stage = f"train@{recipe}-{seed}"
    if stage in before.left_out and stage in before.changed:
        raise SelectionError(
            f"--from {start}: {root.titled(stage)} is out of date and left out of this run; add "
            f"--recipe {recipe} --seed {seed}"
        )
    folder = root.layout.train(recipe, int(seed)) / "policy"
    return folder.relative_to(commands.ROOT).as_posix()


def champion_of(root: Root) -> str:
    """The recipe and seed that the root's report keeps."""
    summary = read_sealed(root.layout.report / "summary.json")
    if (champion := summary["champion"]) is None:
        raise SelectionError(
            f"round {root.number} has no champion: {summary['why']}. Name the policy that round "
            f"{root.number + 1} starts from with --from RECIPE/SEED: there are "
            f"{', '.join(cells_of(params.load(root.params)))}"
        )
    return f"{champion['recipe']}/{champion['seed']}"
