"""winnow read RECIPE: test prompts with samples before and after training, and their verdicts.

Classes: `learned` and `lost` (solved more, or less often after), `solved` and `unsolved` (always,
or never, on both sides), or an outcome that a sample after training has. Control characters in the
texts are shown as escapes."""

import argparse
import importlib
import os
import sys

from flows import roots
from tasks.common import params

CLASSES = (
    *("learned", "lost", "solved", "unsolved"),
    *("correct", "wrong", "unparsed", "truncated", "timeout", "error"),
)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", metavar="RECIPE", help="one that has been evaluated")
    parser.add_argument("--seed", type=int, help="default: the experiment's first")
    parser.add_argument("--prompt", metavar="ID", help="this prompt, or those that begin so")
    parser.add_argument("--class", dest="kind", choices=CLASSES, help="only such prompts")
    parser.add_argument("--prompts", type=int, default=5, help="at most; default: %(default)s")
    parser.add_argument("--samples", type=int, default=2, help="a side; default: %(default)s")
    roots.add_option(parser)


def run(options: argparse.Namespace) -> int:
    """Print the rollouts."""
    params.at_least(1, prompts=options.prompts, samples=options.samples)
    root, seed = roots.existing(options.data), options.seed
    if seed is None:
        values = params.load(root.params)
        seed = params.section(values, "experiment", params.Experiment).seeds[0]
    part = importlib.import_module("tasks.reading.comparisons")
    wanted = part.Wanted(options.prompt, options.kind, options.prompts, options.samples)
    try:
        for text in part.read(root.layout, options.recipe, seed, wanted):
            print(text, flush=True)
    except BrokenPipeError:  # `| head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0
