"""winnow push RECIPE DESTINATION: a trained policy with a model card, its recipe, plan and ledger.

DESTINATION is hf://ORG/NAME (made private where there is none; HF_TOKEN is the key),
s3://bucket/prefix, or a folder."""

import argparse
import importlib

from flows import roots
from tasks.common import params


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", metavar="RECIPE", help="one that has been trained and evaluated")
    parser.add_argument("destination", metavar="DESTINATION", help="hf://... | s3://... | a folder")
    parser.add_argument("--seed", type=int, help="default: the experiment's first")
    parser.add_argument("--overwrite", action="store_true", help="replace what is there")
    roots.add_option(parser)


def run(options: argparse.Namespace) -> int:
    """Write everything, and say what."""
    root = roots.existing(options.data)
    values = params.load(root.params)
    seed = options.seed
    if seed is None:
        seed = params.section(values, "experiment", params.Experiment).seeds[0]
    part = importlib.import_module("tasks.publishing.policy")
    cell = part.TrainedPolicy(options.recipe, seed)
    names = part.push(root.layout, values, cell, options.destination, overwrite=options.overwrite)
    print(f"{cell.name} is at {options.destination}: {', '.join(names)}")
    return 0
