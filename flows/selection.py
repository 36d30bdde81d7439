"""Which stages a flow looks at, and in which order."""

from argparse import ArgumentParser
from collections.abc import Iterable, Mapping
from graphlib import TopologicalSorter

from tasks.common.params import coordinates

Needs = Mapping[str, set[str]]


class SelectionError(ValueError):
    """A recipe, a seed or a stage that the experiment does not have."""


def add_options(parser: ArgumentParser) -> None:
    """The options that name recipes, seeds, and stages to force."""
    parser.add_argument("--recipe", action="append", help="only this recipe (may be repeated)")
    parser.add_argument(
        "--seed", action="append", type=int, help="only this seed (may be repeated)"
    )
    parser.add_argument(
        "--force", action="append", metavar="STAGE", help="run this stage although nothing changed"
    )


def order(needs: Needs) -> list[str]:
    """Every stage after those that it needs; otherwise in the order of `needs`."""
    sorter, ordered = TopologicalSorter(needs), []
    place = {stage: index for index, stage in enumerate(needs)}
    sorter.prepare()
    while sorter.is_active():
        ready = sorted(sorter.get_ready(), key=place.__getitem__)
        ordered += ready
        sorter.done(*ready)
    return ordered


def ready(
    needs: Needs, ordered: Iterable[str], begun: Iterable[str], ended: Iterable[str]
) -> list[str]:
    """Those of `ordered` that may begin now: all that they need among them has ended."""
    stages = list(ordered)
    pending, started = set(stages) - set(ended), set(begun)
    return [stage for stage in stages if stage not in started and not needs[stage] & pending]


def upstream(needs: Needs, stages: Iterable[str]) -> set[str]:
    """`stages` and everything that they need, directly or not."""
    found: set[str] = set()
    pending = list(stages)
    while pending:
        stage = pending.pop()
        if stage not in found:
            found.add(stage)
            pending += needs[stage]
    return found


def cells(needs: Needs) -> dict[str, tuple[str, str]]:
    """The last stage of every cell with its recipe and seed: `evaluate@sgpo-0` is ("sgpo", "0")."""
    places = {stage: coordinates(stage) for stage in needs}
    return {
        stage: (str(recipe), str(seed))
        for stage, (name, recipe, seed) in places.items()
        if name == "evaluate"
    }


def choose(allowed: Iterable[str], wanted: Iterable[str] | None, what: str) -> set[str]:
    """`wanted`, all of `allowed` when it is empty. Raises SelectionError for one that is not
    allowed."""
    known = list(dict.fromkeys(allowed))
    chosen = set(wanted or known)
    unknown = sorted(chosen - set(known))
    if unknown:
        raise SelectionError(
            f"{what} {unknown[0]} is not in the experiment: it has {', '.join(known)} (params.yaml)"
        )
    return chosen


def select(
    needs: Needs, changed: Iterable[str], recipes: Iterable[str] | None, seeds: Iterable[str] | None
) -> tuple[list[str], list[str]]:
    """(stages in order, stages left out) for these recipes and seeds.

    A restriction keeps the chosen cells and what they need. Stages that need all cells (the report)
    stay when the cells that were not chosen are up to date."""
    all_cells = cells(needs)
    chosen_recipes = choose((recipe for recipe, _ in all_cells.values()), recipes, "recipe")
    chosen_seeds = choose((seed for _, seed in all_cells.values()), seeds, "seed")
    chosen = {
        stage
        for stage, (recipe, seed) in all_cells.items()
        if recipe in chosen_recipes and seed in chosen_seeds
    }
    if chosen == set(all_cells):
        return order(needs), []
    other = upstream(needs, set(all_cells) - chosen) - upstream(needs, chosen)
    keep = upstream(needs, chosen) if other & set(changed) else set(needs) - other
    return [stage for stage in order(needs) if stage in keep], [
        stage for stage in needs if stage not in keep
    ]
