"""winnow eval RECIPE --tasks gsm8k,hellaswag: a trained policy on named benchmarks, beside pass@1.

Runs lm-evaluation-harness, an extra: pip install -e ".[eval]" with requirements.txt as constraint.
Each task is recorded when it is done, and not run again; the records also go to MLflow. A task file
of your own is one of the harness's, in the folder of --include-path; its tables are files of this
machine. Python that it names runs only with --trust-tasks."""

import argparse
import importlib
from pathlib import Path
from typing import Any

from flows import commands
from tasks.common import params, tracking
from tasks.common.layout import Layout

LAYOUT = Layout(commands.ROOT / "data")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", metavar="RECIPE", nargs="?", help="one that has been trained")
    parser.add_argument("--seed", type=int, help="default: the experiment's first")
    parser.add_argument("--baseline", action="store_true", help="the initial policy, too, or alone")
    parser.add_argument("--tasks", required=True, metavar="NAME,...", help="tasks of the harness")
    parser.add_argument("--limit", type=int, help="at most so many problems of a task; for a try")
    parser.add_argument("--include-path", type=here, metavar="FOLDER", help="your own task files")
    parser.add_argument("--trust-tasks", action="store_true", help="run the Python that they name")
    parser.add_argument(
        "--few-shot", type=int, help="examples before a problem; default: the task's"
    )
    parser.add_argument("--max-tokens", type=int, help="of an answer; default: the task's")
    parser.add_argument(
        "--chat-template",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="default: where the policy has one",
    )
    parser.add_argument("--backend", choices=("hf", "vllm"), help="default: as engine.name")
    parser.add_argument("--batch-size", type=int, help="default: what fits")


def here(path: str) -> Path:
    """A path as it was typed, before the command goes to the project's folder."""
    return Path(path).expanduser().absolute()


def run(options: argparse.Namespace) -> int:
    """Measure, record, and print everything that has been measured beside pass@1."""
    values = params.load(commands.ROOT / "params.yaml")
    records = importlib.import_module("tasks.harness.records")
    cells, asked = cells_of(options, values, records.Subject), asked_of(options)
    part = importlib.import_module("tasks.harness.run")
    done: list[Any] = []
    try:
        for cell, path, record in part.measure(LAYOUT, values, cells, part.Asked(**asked)):
            done.append((cell, path, record))
    finally:
        tell(values, [one for one in done if not one[2]["is_told"]], records)
    print(records.table(LAYOUT))
    return 0


def cells_of(options: argparse.Namespace, values: dict[str, Any], cell: Any) -> list[Any]:
    """The policies that are asked for, the initial one first."""
    if options.recipe is None and not options.baseline:
        raise params.ParamsError("name a RECIPE, or --baseline for the initial policy")
    found = [cell()] if options.baseline else []
    if options.recipe is None:
        return found
    experiment = params.section(values, "experiment", params.Experiment)
    seed = experiment.seeds[0] if options.seed is None else options.seed
    return [*found, cell(options.recipe, seed)]


def asked_of(options: argparse.Namespace) -> dict[str, Any]:
    """The options as `tasks.harness.run.Asked` has them, checked."""
    least = {"limit": 1, "max_tokens": 1, "batch_size": 1, "few_shot": 0}
    for name, number in least.items():
        if getattr(options, name) is not None:
            params.at_least(number, **{name: getattr(options, name)})
    tasks = [name.strip() for name in options.tasks.split(",") if name.strip()]
    if not tasks:
        raise params.ParamsError("--tasks names no task: give gsm8k, or several with commas")
    names = ("trust_tasks", "chat_template", "backend", *least)
    return {
        "tasks": tasks,
        "include": options.include_path,
        **{name: getattr(options, name) for name in names},
    }


def tell(values: dict[str, Any], new: list[Any], records: Any) -> None:
    """Have MLflow keep what it does not have yet: in a run for each policy, and in the run of its
    cell."""
    settings = params.section(values, "tracking", tracking.Tracking)
    for cell in dict.fromkeys(cell for cell, _, _ in new):
        with tracking.track(settings, LAYOUT, "eval", None, None) as tracker:
            tracker.tags({"benchmarked": cell.name})
            for _, path, record in (one for one in new if one[0] == cell):
                metrics = {
                    f"eval/{task}/{name}": metric["value"]
                    for task, name, metric in records.shown(record)
                }
                tracker.benchmark(cell.recipe, cell.seed, cell.evidence(LAYOUT), metrics)
                records.told(path)
