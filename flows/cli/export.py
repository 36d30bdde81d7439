"""winnow export RECIPE --to TARGET: a recipe's plan as training data of another trainer.

The folder has the prompts in the order of training with their group sizes, `settings.txt` (the
lines that the trainer must be given), `reward.py` for trainers that take one, and `manifest.json`:
the digests of policy, prompts, profile and plan, the sampling parameters, and what the trainer's
format cannot carry. `winnow grade` grades for all of them. With --check the trainer's own loader
reads the export, and what arrives is compared with the plan."""

import argparse
import sys
from pathlib import Path

from flows.cli import flags
from flows.pipeline import roots


def add_options(parser: argparse.ArgumentParser) -> None:
    from tasks.common import registry
    from tasks.train.external import targets

    parser.add_argument("recipe", metavar="RECIPE", help="a recipe that has a plan")
    parser.add_argument("--to", required=True, choices=registry.names(targets))
    flags.add_cell(parser)
    folder = "a new folder (default: exports/RECIPE-SEED-TARGET)"
    parser.add_argument("--out", metavar="DIR", type=flags.location, help=folder)
    parser.add_argument(
        "--prompts-only",
        action="store_true",
        help="the prompts that the recipe's strategy kept, with their pass rates, in no order",
    )
    parser.add_argument(
        "--control",
        choices=("random",),
        help="also write an equally large random subset of all training prompts",
    )
    parser.add_argument(
        "--plain", action="store_true", help="the bare answer as ground truth, without reward.py"
    )
    parser.add_argument(
        "--unordered", action="store_true", help="accept a trainer that shuffles its prompts"
    )
    parser.add_argument(
        "--check",
        nargs="?",
        const=sys.executable,
        metavar="PYTHON",
        help="load the export by the trainer, in an interpreter that has it (default: this one)",
    )


def run(options: argparse.Namespace) -> int:
    """Write the export, and print what it has and what it lacks."""
    from tasks.train.external import check, export, visits  # takes two seconds

    root = roots.existing(options.data)
    if options.check:
        check.require_loader(options.to)
    values, layout, seed = root.values, root.layout, flags.seed_of(options, root.values)
    recipe, cell = options.recipe, f"{options.recipe}/{seed}"
    found = visits.of_recipe(layout, values, recipe, seed, prompts_only=options.prompts_only)
    name = f"{cell.replace('/', '-')}-{options.to}"
    out = Path(options.out or flags.location(f"exports/{name}"))
    control = seed if options.control else None
    wanted = export.Options(options.to, options.plain, options.unordered, control)
    manifest = export.export(found, wanted, values, layout, cell, out)
    for segment in manifest["segments"]:
        size = segment["group_size"] or "own size each"
        print(f"{segment['file']}: {segment['visits']} visits, groups: {size}")
    for lost in manifest["not_carried"]:
        print(f"not carried: {lost}")
    print(f"{out}: settings.txt has the lines to set, manifest.json the rest")
    if options.check:
        for sentence in check.check(found, wanted, manifest, out, options.check):
            print(sentence)
    return 0
