"""winnow read RECIPE: test prompts with samples before and after training, and their verdicts.
winnow read --profile, --baseline: prompts with samples of the initial policy, and their verdicts.
winnow read external/NAME: rollouts that `winnow import` read. external/NAME/eval: a checkpoint.

Classes: `learned` and `lost` (solved more or less often after training), `solved` and `unsolved`
(always or never solved, before and after), or an outcome of a sample after training. Control
characters in the texts are shown as escapes."""

import argparse

from flows.cli import flags
from flows.pipeline import roots
from flows.reading.comparisons import CLASSES, EXTERNAL, Request, read
from tasks.common import params


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", metavar="RECIPE", nargs="?", help="an evaluated recipe")
    flags.add_cell(parser)
    for part, split in (("profile", "train"), ("baseline", "test")):
        text = f"instead of a recipe: the {part}, on {split} prompts"
        parser.add_argument(f"--{part}", dest="part", action="store_const", const=part, help=text)
    parser.add_argument("--prompt", metavar="ID", help="only prompts whose id begins with ID")
    parser.add_argument("--class", dest="kind", choices=CLASSES, help="only prompts of this class")
    parser.add_argument(
        "--prompts", type=flags.count(1), default=5, help="maximum number; default: %(default)s"
    )
    parser.add_argument(
        "--samples", type=flags.count(1), default=2, help="on each side; default: %(default)s"
    )


def run(options: argparse.Namespace) -> int:
    """Print the rollouts."""
    if (options.recipe is None) == (options.part is None):
        raise params.ParamsError("set RECIPE, --profile or --baseline")
    root = roots.existing(options.data)
    is_cell = options.part is None and not options.recipe.startswith(EXTERNAL)
    seed = None if not is_cell else flags.seed_of(options, params.load(root.params))
    request = Request(options.prompt, options.kind, options.prompts, options.samples)
    for text in read(root.layout, options.part or options.recipe, seed, request):
        print(text, flush=True)
    return 0
