"""winnow plan: which stages would run and why, and what they would cost. It runs nothing.

The reasons are DVC's, with the code looked at as it is now. A stage after one that would run may
turn out to have nothing to do; a later round may start from another policy, once the round before
it has run. The costs are intervals: see what the rates are from, below the
table."""

import argparse
import hashlib
import importlib
import json
from collections.abc import Callable, Mapping
from typing import Any

from flows import commands, lock, reasons, roots, rounds, selection
from flows.roots import Root
from flows.rounds import FlowRequest
from flows.stages import CODE, changes_of, explain, forced_of
from tasks.common import params

AFTER = "after "  # how the reason of a stage begins that only follows others
MISSING = "input missing"  # said only where nothing else is: what makes it would run before
WIDTH = 72


def add_options(parser: argparse.ArgumentParser) -> None:
    selection.add_options(parser)
    rounds.add_options(parser, starts=False)


def run(options: argparse.Namespace) -> int:
    """Print the plan of every data root."""
    request = rounds.request_of(options)
    request.check()
    first, *later = request.chain
    roots.existing(first.folder)
    with commands.Dvc() as dvc:
        for root in request.chain:
            if not (commands.ROOT / root.pipeline).exists():
                print(f"{root.folder}: never run; all of it would run after the round before it")
                return 0
            planned = plan_of(dvc, root, request)
            if later:
                print(f"{root.folder}, from {params.load(root.params)['policy']['source']}:")
            print(planned)
    return 0


def plan_of(dvc: commands.Dvc, root: Root, request: FlowRequest) -> str:
    """The plan of one data root."""
    if root.number > 1:
        roots.refresh(root)
    values = importlib.import_module("tasks.code.effective").complete(params.load(root.params))
    needs = roots.own_needs(root, dvc.graph())
    changed = changes_of(dvc, root, root.pipeline)
    forced = forced_of(root, needs, request.force)
    found = why(root, needs, changed, cells_of(values), forced)
    ordered, left_out = selection.select(needs, list(found), request.recipes, request.seeds)
    stages = [stage for stage in ordered if stage in found]
    said = [f"left out: {', '.join(left_out)}"] if left_out else []
    if stages:
        return "\n".join([*said, table(root, values, stages, found)])
    return "\n".join([*said, f"nothing to do: all {len(ordered)} stages are up to date"])


def cells_of(values: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """The digests and the settings that the stage `code` would write, by the name of each cell's
    files below data/code/. `values` are complete."""
    cells = importlib.import_module("tasks.code.cells").cells(values, commands.ROOT)
    settings = importlib.import_module("tasks.code.effective").of_cells(values)
    return {name: (cell.digests(commands.ROOT), settings[name]) for name, cell in cells.items()}


def why(
    root: Root,
    needs: Mapping[str, set[str]],
    changed: Mapping[str, list[Any]],
    code: Mapping[str, Any],
    forced: set[str],
) -> dict[str, str]:
    """The reason of every stage that would run, or may because one before it would."""
    entries = lock.read(root.lock)
    found: dict[str, str] = {}
    for stage in selection.order(needs):
        phrases = ["asked for by --force"] if stage in forced else []
        if stage not in entries:
            phrases.append("never run")
        else:
            if others := without_code(root, changed.get(stage, [])):
                said = explain(root, stage, others)
                phrases += [word for word in said if not word.startswith(MISSING)] or said
            phrases += code_reasons(root, stage, entries[stage], code)
        before = sorted((needs[stage] - {CODE}) & set(found))
        if phrases:
            found[stage] = "; ".join(dict.fromkeys(phrases))
        elif before and stage != CODE:
            found[stage] = AFTER + ", ".join(before)
    return found


def without_code(root: Root, changes: list[Any]) -> list[Any]:
    """The changes but for the digest files of the code: those on the disk are of the last run."""
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
    """What differs between the code now and that of the stage's last run."""
    name, recipe, _ = params.coordinates(stage)
    cell = f"{recipe}/{name}" if recipe else name
    if cell not in code:
        return []
    now, settings = code[cell]
    path = root.layout.code(name, recipe).relative_to(commands.ROOT).as_posix()
    locked = {dep["path"]: dep.get("md5", "") for dep in entry.get("deps", [])}
    file = path.replace(".json", ".params.yaml")
    ran_with = entry.get("params", {}).get(file)
    found = (
        [f"{file} is new here"]
        if ran_with is None
        else reasons.explain_params(ran_with, settings, list({**ran_with, **settings}))
    )
    if path in locked and md5(now) != locked[path]:
        found += reasons.explain_digests(path, locked[path], now, commands.ROOT)
    return found


def md5(value: Any) -> str:
    """DVC's digest of a JSON file as `files.write_json` writes it."""
    text = json.dumps(value, indent=2, sort_keys=True, ensure_ascii=False, allow_nan=False) + "\n"
    return hashlib.md5(text.encode(), usedforsecurity=False).hexdigest()


def table(
    root: Root, values: Mapping[str, Any], stages: list[str], found: Mapping[str, str]
) -> str:
    """A line a stage with its cost and its reason, and the sum."""
    forecast = importlib.import_module("tasks.doctor.forecast")
    places = [params.coordinates(stage) for stage in stages]
    costs, source = forecast.forecast(values, root.layout, places, places)
    lines = [f"{'stage':24} {'tokens':>22} {'FLOPs':>26} {'hours':>22}  why"]
    for stage, cost in zip(stages, costs, strict=True):
        numbers = columns(cost) if cost else f"{'unknown':>22} {'':26} {'':22}"
        lines.append(f"{stage:24} {numbers}  {shortened(found[stage])}")
    if all(cost is not None for cost in costs):
        total = sum(costs, forecast.Cost())
        lines += [f"{'all':24} {columns(total)}", f"GPU-hours {interval(total.gpu_hours, clock)}"]
    sure = sum(not found[stage].startswith(AFTER) for stage in stages)
    may = len(stages) - sure
    lines += [
        f"{sure} would run" + (f", {may} may, as what is before them does" if may else ""),
        f"expected (at least to at most); rates: {source}",
    ]
    return "\n".join(lines)


def columns(cost: Any) -> str:
    hours = interval(cost.hours, clock)
    return f"{interval(cost.tokens):>22} {interval(cost.flops):>26} {hours:>22}"


def interval(value: Any, word: Callable[[float], str] | None = None) -> str:
    """`4.1M (2.0M to 8.2M)`; one number where it is exactly that."""
    low, middle, high = map(word or short, (value.low, value.middle, value.high))
    return middle if low == high else f"{middle} ({low} to {high})"


def clock(hours: float) -> str:
    return f"{hours:.2f}" if hours < 10 else f"{hours:,.0f}"


def short(number: float) -> str:
    """Two digits and a unit; small numbers as they are."""
    for limit, unit in ((1e18, ""), (1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if number >= limit:
            return f"{number:.1e}" if not unit else f"{number / limit:.3g}{unit}"
    return f"{number:.2g}"


def shortened(reason: str) -> str:
    return reason if len(reason) <= WIDTH else reason[: WIDTH - 3] + "..."
