"""Making a world: the real pipeline at the smallest sizes, stage by stage."""

import json
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from tests.bench.chaos.operations import Plan
from tests.bench.chaos.world import (
    DONE,
    FLOW,
    STAGES,
    World,
    differing,
    direct,
    end,
    outputs,
    remove,
    repro,
)
from tests.files import commit_all, copy_project
from tests.flows.project import COPIED
from tests.parameters import every_value
from tests.stages import give_record


def parameters() -> dict[str, Any]:
    """Return params.yaml with the smallest sizes at which every stage still has work to do."""
    values = every_value()
    values["experiment"] = {"recipes": ["grpo"], "seeds": [0]}
    sums = {"min_terms": 2, "max_terms": 3, "min_digits": 1, "max_digits": 1}
    values["ingest"]["splits"] = {"train": 48, "validation": 8, "test": 16}
    (source,) = values["ingest"]["sources"]
    source["settings"]["num_prompts"] = 200
    source["settings"]["tasks"][0]["config"] = sums
    tiny = values["policy"]["tiny"]
    tiny["families"][0]["settings"] |= {
        "config": sums,
        "direct_rate_shortest": 1.0,
        "direct_rate_longest": 1.0,
    }
    tiny["model"] |= {"num_layers": 1, "hidden_size": 64, "num_heads": 2}
    tiny["model"] |= {"num_key_value_heads": 2, "intermediate_size": 128, "max_length": 128}
    tiny["training"]["tokens"] = 1.0e5
    values["sampling"]["max_tokens"] = 16
    values["engine"] |= {"name": "hf", "device": "cpu", "max_rows": 64}
    values["store"]["batch_rollouts"] = 64
    values["verify"] |= {"processes": 1, "seconds": 2.0, "clock_factor": 2.0}
    values["gates"]["min_solved_rate"] = 0.0
    values["allocate"]["passes"] = 2
    values["checkpoint"]["every_seconds"] = 0.0  # a checkpoint per step
    values["evaluate"] |= {"num_samples": 4, "pass_at": [1, 4], "num_bootstrap": 50}
    values["report"]["num_bootstrap"] = 50
    values["train"]["validation"] = {"num_samples": 1, "every_share": 0.25}
    return {name: value for name, value in values.items() if name != "recipes"}


def make_world(
    library: Path,
    folder: Path,
    stages: Sequence[str] = tuple(STAGES),
) -> World:
    """Return the world in `folder`, with these stages. If it is missing, make it stage by stage. A
    world without a report is made faster, without comparisons."""
    folder.mkdir(parents=True, exist_ok=True)
    plan = Plan.make(library, folder / "plan", folder / "project")
    world = World(folder, plan)
    end(world.processes())  # left by a killed harness
    facts = folder / "facts.json"
    if not facts.exists():
        remove(folder / "project")
        remove(folder / "snapshots")
        facts.write_text(json.dumps(build(world, stages)))
    world.facts = json.loads(facts.read_text())
    world.close()
    world.restore(DONE)
    world.serve_forks()
    return world


def build(world: World, stages: Sequence[str]) -> dict[str, Any]:
    """Run every stage undisturbed, under dvc and alone, and return its duration, its number of file
    operations, and the digests of its outputs. The digests must agree, or the harness cannot
    compare."""
    make_project(world.project)
    (world.folder / "tmp").mkdir(exist_ok=True)
    (world.folder / "home").mkdir(exist_ok=True)
    world.serve_forks()
    is_whole = stages[-1] == "report"
    if not is_whole:
        give_record(world.data)
    found: dict[str, Any] = {}
    for stage in stages:
        world.snapshot(stage)
        under_dvc = measured(world, repro(stage))
        found[stage] = {"dvc": under_dvc, "direct": under_dvc}
    world.snapshot(DONE)
    made = outputs(world.project, stages)
    if is_whole:  # Prefect creates its database
        measured(world, [*FLOW, "--force", "report"])
    shutil.copytree(world.folder / "home", world.folder / "snapshots" / "home", symlinks=True)
    for stage in stages if is_whole else ():
        world.restore(stage)
        found[stage]["direct"] = measured(world, direct(stage, world.project))
        if wrong := differing(world.project, made[stage]):
            raise RuntimeError(f"{stage} makes other outputs when it runs again: {wrong}")
    return {"stages": found, "outputs": made}


def measured(world: World, line: list[str]) -> dict[str, Any]:
    world.plan.set()
    started = time.perf_counter()
    code, said = world.run(line, forked=True)
    if code:
        raise RuntimeError(f"{' '.join(line)} failed in an undisturbed world:\n{said}")
    seconds = round(time.perf_counter() - started, 2)
    counted = {"operations": world.plan.seen, "on_record": world.plan.seen_record}
    return {"seconds": seconds, **counted}


def make_project(root: Path) -> None:
    """Make a git repository of the real dvc.yaml, flows and tasks, with small parameters."""
    copy_project(root, *COPIED, "flows", "recipes", "tasks")
    (root / "params.yaml").write_text(yaml.safe_dump(parameters(), sort_keys=False))
    commit_all(root)
