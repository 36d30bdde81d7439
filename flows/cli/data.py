"""winnow data: prompts as the policy receives them, in its chat template, with their golds and the
verifier's verdict on each. It samples nothing. Control characters are shown as escapes."""

import argparse

from flows.cli import flags
from flows.pipeline import roots

SPLITS = ("train", "validation", "test")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--split", choices=SPLITS, default="train", help="default: %(default)s")
    parser.add_argument("--prompt", metavar="ID", help="only prompts whose id begins with ID")
    parser.add_argument(
        "--prompts", type=flags.count(1), default=5, help="maximum number; default: %(default)s"
    )
    flags.add_root(parser)


def run(options: argparse.Namespace) -> int:
    """Print the prompts."""
    from flows.reading import prompts  # imports torch

    root = roots.existing(options.data)
    for text in prompts.read(
        root.values, root.layout, options.split, options.prompt, options.prompts
    ):
        print(text, flush=True)
    return 0
