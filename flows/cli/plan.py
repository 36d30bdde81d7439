"""winnow plan: which stages would run and why, what they would cost, and what fits into the budget.
It runs and writes nothing, also with --set; only --look samples a few prompts into the store.

The reasons are DVC's, with the current code. A stage after one that would run may turn out to be up
to date. The costs are intervals; the source of the rates is below the table."""

import argparse
import hashlib
import importlib
import json
from collections.abc import Mapping
from typing import Any

from flows.cli import costs, flags
from flows.pipeline import commands, lock, reasons, roots, selection, status
from flows.pipeline.request import FlowRequest
from flows.pipeline.roots import Root
from flows.pipeline.stages import CODE, changes_of, explain, forced_of
from tasks.common import params
from tasks.common.config.editing import overridden
from tasks.common.files import ArtifactError
from tasks.common.redaction import without_secrets

AFTER = "after "  # prefix of the reason of a stage that only follows others
MISSING = "input missing"  # omitted beside other reasons: an earlier stage would write it
WIDTH = 72


def add_options(parser: argparse.ArgumentParser) -> None:
    flags.add_request(parser)
    costs.add_price(parser)
    costs.add_look(parser)


def run(options: argparse.Namespace) -> int:
    """Print the plan of a data root."""
    request = flags.request_of(options)
    root = roots.existing(request.data)
    if text := status.now():
        raise commands.CommandError(f"{text}\nDVC cannot examine the stages before it ends")
    with commands.Dvc() as dvc:
        print(plan_of(dvc, root, request, options.price))
    if found := costs.look(options, values_of(root, request.overrides), root.layout):
        print(found)
    return 0


def plan_of(dvc: commands.Dvc, root: Root, request: FlowRequest, price: float | None) -> str:
    """Return a root's plan as text. Raise ParamsError if `costs.bought` does."""
    values = values_of(root, request.overrides)
    needs = with_cells(roots.own_needs(root, dvc.graph()), values["experiment"])
    changed = changes_of(dvc, root, root.pipeline)
    forced = forced_of(needs, request.force)
    causes = why(root, needs, changed, cells_of(values), forced)
    if request.overrides:
        causes = {CODE: without_secrets(f"--set {' '.join(request.overrides)}")} | causes
    limits = request.recipes, request.seeds, forced, request.until
    ordered, left_out = selection.select(needs, list(causes), *limits)
    stages = [stage for stage in ordered if stage in causes]
    said = [f"left out: {', '.join(left_out)}"] if left_out else []
    if stages:
        recipes = list(dict.fromkeys(r for _, r, _ in map(params.coordinates, stages) if r))
        said.append(table(root, values, stages, causes))
        said.append(costs.bought(values, root.layout, recipes, price))
    else:
        said.append(f"nothing to do: all {len(ordered)} stages are up to date")
    return "\n".join([*said, *([] if "profile" in stages else advice(values, root))])


def advice(values: Mapping[str, Any], root: Root) -> list[str]:
    """Return what the profile alone says about the recipes, as lines; none without a profile."""
    if not (root.layout.profile / "profile.parquet").exists():
        return []
    try:
        return [*importlib.import_module("tasks.allocate.advice").advise(values, root.layout)]
    except ArtifactError as error:
        return [str(error)]


def values_of(root: Root, overrides: list[str]) -> dict[str, Any]:
    """Return a root's complete values with `overrides`, without writing them."""
    if not overrides:
        return root.values
    _, values = overridden(root.params.read_text(), root.params.name, overrides)
    return dict(importlib.import_module("tasks.code.effective").complete(values))


def with_cells(needs: dict[str, set[str]], experiment: Mapping[str, Any]) -> dict[str, set[str]]:
    """Return DVC's graph with the cells of `experiment`, which --set may have changed."""
    cells = [
        f"@{recipe}-{seed}" for recipe in experiment["recipes"] for seed in experiment["seeds"]
    ]
    first = next(stage[stage.index("@") :] for stage in needs if "@" in stage)
    found = {}
    for stage, before in needs.items():
        kept = [name for name in before if "@" not in name or name.endswith(first)]
        for cell in cells if stage.endswith(first) else [first] * ("@" not in stage):
            each = [cell] if "@" in stage else cells
            found[stage.replace(first, cell)] = {n.replace(first, c) for n in kept for c in each}
    return found


def cells_of(values: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the digests and the settings that the stage `code` would write, keyed by the name of
    each cell's files below data/code/. `values` include the defaults."""
    cells = importlib.import_module("tasks.code.cells").cells(values, commands.CODE)
    settings = importlib.import_module("tasks.code.effective").of_cells(values)
    return {name: (cell.digests(commands.CODE), settings[name]) for name, cell in cells.items()}


def why(
    root: Root,
    needs: Mapping[str, set[str]],
    changed: Mapping[str, list[Any]],
    code: Mapping[str, Any],
    forced: set[str],
) -> dict[str, str]:
    """Return the reason why each stage would or may run, by stage; omit up-to-date stages."""
    entries = lock.read(root.lock)
    causes: dict[str, str] = {}
    for stage in selection.order(needs):
        phrases = ["requested by --force"] if stage in forced else []
        if stage not in entries:
            phrases.append("never run")
        else:
            if others := without_code(root, changed.get(stage, [])):
                said = explain(root, stage, others)
                phrases += [word for word in said if not word.startswith(MISSING)] or said
            phrases += code_reasons(root, stage, entries[stage], code)
        before = sorted((needs[stage] - {CODE}) & set(causes))
        if phrases:
            causes[stage] = "; ".join(dict.fromkeys(phrases))
        elif before and stage != CODE:
            causes[stage] = AFTER + ", ".join(before)
    return causes


def without_code(root: Root, changes: list[Any]) -> list[Any]:
    """Return the changes except those of the code digests, whose files date from the last run."""
    kept = []
    for change in changes:
        if isinstance(change, dict) and "changed deps" in change:
            deps = {
                path: how
                for path, how in change["changed deps"].items()
                if not path.startswith(f"{root.folder}/code/")
            }
            change = {"changed deps": deps} if deps else None
        if change:
            kept.append(change)
    return kept


def code_reasons(
    root: Root, stage: str, entry: Mapping[str, Any], code: Mapping[str, Any]
) -> list[str]:
    """Return how the code and settings in `code` (`cells_of`) differ from the stage's last run."""
    name, recipe, _ = params.coordinates(stage)
    cell = f"{recipe}/{name}" if recipe else name
    if cell not in code:
        return []
    now, settings = code[cell]
    path = root.layout.code(name, recipe).relative_to(commands.ROOT).as_posix()
    locked = {dep["path"]: dep.get("md5", "") for dep in entry.get("deps", [])}
    file = path.replace(".json", ".params.yaml")
    ran_with = entry.get("params", {}).get(file)
    phrases = (
        [f"{file} is new here"]
        if ran_with is None
        else reasons.explain_params(ran_with, settings, list({**ran_with, **settings}))
    )
    if path in locked and md5(now) != locked[path]:
        phrases += reasons.explain_digests(path, locked[path], now, commands.ROOT)
    return phrases


def md5(value: Any) -> str:
    """Return the MD5 digest that DVC computes for a JSON file written by `files.write_json`."""
    text = json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n"
    return hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()


def table(
    root: Root, values: Mapping[str, Any], stages: list[str], causes: Mapping[str, str]
) -> str:
    """Return a table of each stage's cost and reason, and the total if all costs are known."""
    from flows.doctor import forecast  # takes two seconds

    places = [params.coordinates(stage) for stage in stages]
    costs_of, source = forecast.forecast(values, root.layout, places)
    rows = [row(stage, cost, causes[stage]) for stage, cost in zip(stages, costs_of, strict=True)]
    lines = []
    known = [cost for cost in costs_of if cost is not None]
    if len(known) == len(stages):
        total = sum(known, forecast.Cost())
        rows.append(row("all", total, ""))
        if total.gpu_hours.high:
            lines.append(f"GPU time {costs.interval(total.gpu_hours)}")
    sure = sum(not causes[stage].startswith(AFTER) for stage in stages)
    may = len(stages) - sure
    return "\n".join(
        [
            costs.table(rows),
            *lines,
            f"{sure} would run" + (f", {may} may, depending on earlier stages" if may else ""),
            f"expected (at least to at most); samples in the store cost nothing; speed: {source}",
        ]
    )


def row(stage: str, cost: Any, why: str) -> dict[str, str]:
    numbers = {"tokens": "unknown", "FLOPs": "", "time": ""}
    if cost:
        counts = (costs.interval(value, costs.short) for value in (cost.tokens, cost.flops))
        numbers = dict(zip(numbers, (*counts, costs.interval(cost.hours)), strict=True))
    return {
        "stage": stage,
        **numbers,
        "why": why if len(why) <= WIDTH else f"{why[: WIDTH - 3]}...",
    }
