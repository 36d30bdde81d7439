"""The stages of a run, and their order."""

from collections.abc import Iterable, Mapping
from graphlib import TopologicalSorter
from typing import Any, TypeVar

from tasks.common.params import coordinates

Needs = Mapping[str, set[str]]
T = TypeVar("T")


class SelectionError(ValueError):
    """Raised if a requested recipe, seed or stage is not available."""


def sorter(needs: Needs) -> TopologicalSorter[str]:
    """Return a prepared sorter of the stages in `needs`; dependencies outside it are ignored."""
    graph = {stage: needs[stage] & set(needs) for stage in needs}
    prepared = TopologicalSorter(graph)
    prepared.prepare()
    return prepared


def order(needs: Needs) -> list[str]:
    """Return the stages in topological order: first those that cells share, then one cell after the
    other, so that the first results come early; ties in the order of `needs`."""
    graph, ordered, ready = sorter(needs), list[str](), list[str]()
    rank, first = dict[str, Any](), dict[Any, int]()
    for place, stage in enumerate(needs):
        _, *cell = coordinates(stage)
        rank[stage] = cell[0] is not None, first.setdefault(tuple(cell), place), place
    while graph.is_active():
        ready = sorted([*ready, *graph.get_ready()], key=rank.__getitem__)
        ordered.append(ready.pop(0))
        graph.done(ordered[-1])
    return ordered


def upstream(needs: Needs, stages: Iterable[str]) -> set[str]:
    """Return `stages` and everything that they need, directly or indirectly."""
    found: set[str] = set()
    pending = list(stages)
    while pending:
        stage = pending.pop()
        if stage not in found:
            found.add(stage)
            pending += needs[stage]
    return found


def choose(allowed: Iterable[T], requested: Iterable[T] | None, what: str) -> set[T]:
    """Return `requested`; if it is empty, all of `allowed`. Raise SelectionError for an item that
    is not allowed."""
    known = list(dict.fromkeys(allowed))
    selected = set(requested or known)
    unknown = sorted(selected - set(known), key=str)
    if unknown:
        there = ", ".join(map(str, known))
        raise SelectionError(
            f"{what} {unknown[0]} is not in the experiment: it has {there} (params.yaml)"
        )
    return selected


def select(
    needs: Needs,
    changed: Iterable[str],
    recipes: Iterable[str] | None,
    seeds: Iterable[int] | None,
    forced: Iterable[str] = (),
    until: Iterable[str] = (),
) -> tuple[list[str], list[str]]:
    """Return (stages in order, stages left out) for these recipes and seeds, up to the stages
    `until` (`train`: all its cells); none given means all.

    A restriction keeps the chosen cells and their upstream stages. Stages that need all cells (the
    report) stay if no omitted stage, and none upstream of it, is in `changed`: DVC reports a stage
    as changed only after its inputs have. Raise SelectionError for unknown names, and
    for a stage in `forced` that is left out."""
    all_cells = {place: coordinates(place) for place in needs if place.startswith("evaluate@")}
    kept_recipes = choose((recipe for _, recipe, _ in all_cells.values()), recipes, "recipe")
    kept_seeds = choose((seed for _, _, seed in all_cells.values()), seeds, "seed")
    cells = {
        stage
        for stage, (_, recipe, seed) in all_cells.items()
        if recipe in kept_recipes and seed in kept_seeds
    }
    other = upstream(needs, set(all_cells) - cells) - upstream(needs, cells)
    is_stale = bool(upstream(needs, other) & set(changed))
    keep = upstream(needs, cells) if is_stale else set(needs) - other
    if until:
        names = {stage: coordinates(stage)[0] for stage in needs}
        last = choose([*names, *names.values()], until, "stage")
        before = upstream(needs, {stage for stage in needs if {stage, names[stage]} & last}) - other
        keep = {s for s in before if not (is_stale and upstream(needs, {s}) & other)}
    left_out = [stage for stage in needs if stage not in keep]
    if lost := sorted(set(forced) & set(left_out)):
        raise SelectionError(f"--force {lost[0]}: this run leaves it out: run all recipes")
    return [stage for stage in order(needs) if stage in keep], left_out
