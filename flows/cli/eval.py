"""winnow eval RECIPE --tasks gsm8k,hellaswag: a policy's results on benchmarks, beside pass@1.

Runs lm-evaluation-harness, an extra: pip install -e ".[eval]" with requirements.txt as constraint.
Each finished task is recorded and not run again; the records also go to MLflow. Put your own task
files (in the harness's format) in the folder of --include-path, and keep their data tables in local
files. Task files can run code, so they also require --trust-tasks."""

import argparse
import importlib
from dataclasses import fields
from typing import Any

from flows.cli import flags
from flows.cli.flags import count
from flows.pipeline import roots
from tasks.common import params


def add_options(parser: argparse.ArgumentParser) -> None:
    flags.add_cell(parser, "a trained recipe", nargs="?")
    parser.add_argument("--baseline", action="store_true", help="also, or only, the initial policy")
    parser.add_argument(
        "--tasks", required=True, type=names, metavar="NAME,...", help="tasks of the harness"
    )
    parser.add_argument(
        "--limit", type=count(1), help="maximum number of problems per task, for a trial"
    )
    own = "of your own task files"
    parser.add_argument(
        "--include-path", dest="include", type=flags.location, metavar="FOLDER", help=own
    )
    parser.add_argument("--trust-tasks", action="store_true", help="let task files run code")
    parser.add_argument(
        "--few-shot", type=count(0), help="examples before a problem; default: the task's"
    )
    parser.add_argument("--max-tokens", type=count(1), help="per answer; default: the task's")
    parser.add_argument(
        "--chat-template",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="default: if the policy has one",
    )
    parser.add_argument("--backend", choices=("hf", "vllm"), help="default: as engine.name")
    parser.add_argument("--batch-size", type=count(1), help="default: as many as fit")


def names(text: str) -> list[str]:
    """Split a list of names at commas. Raise ArgumentTypeError if it is empty."""
    if not (found := [name.strip() for name in text.split(",") if name.strip()]):
        raise argparse.ArgumentTypeError("no task: use gsm8k, or several separated by commas")
    return found


def run(options: argparse.Namespace) -> int:
    """Measure the policies, record the results, and print them beside pass@1."""
    root = roots.existing(options.data)
    values, layout = params.load(root.params), root.layout
    records = importlib.import_module("tasks.harness.records")
    cells = cells_of(options, values, records.Subject)
    part = importlib.import_module("tasks.harness.run")
    asked = part.Asked(**{one.name: getattr(options, one.name) for one in fields(part.Asked)})
    new: list[Any] = []
    try:
        for one in part.measure(layout, values, cells, asked):
            if not one[2]["is_told"]:
                new.append(one)
    finally:
        records.publish(values, layout, new)
    print(records.table(layout))
    return 0


def cells_of(options: argparse.Namespace, values: dict[str, Any], cell: Any) -> list[Any]:
    """Return a `cell` per requested policy, initial first. Raise ParamsError if there is none."""
    if options.recipe is None and not options.baseline:
        raise params.ParamsError("set RECIPE, or --baseline for the initial policy")
    initial = [cell()] if options.baseline else []
    trained = [cell(options.recipe, flags.seed_of(options, values))] if options.recipe else []
    return initial + trained
