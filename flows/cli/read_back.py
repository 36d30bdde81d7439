"""winnow import FOLDER --from TRAINER: reads the rollouts that another trainer dumped.

They are matched with this root's prompts by the ground truth that `winnow export` wrote (with
--plain, and where the trainer dumps none, by the prompt's text), graded again by the root's
verifiers, and stored as external/NAME/rollouts.parquet. Rollouts whose score differs from the
trainer's are shown. The report's page has a row for each import."""

import argparse
import re
from pathlib import Path

from flows.cli import flags
from flows.pipeline import roots
from tasks.common.params import ParamsError

SOURCES = ("areal", "trl", "verifiers", "verl")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="FOLDER", type=flags.location)
    parser.add_argument("--from", dest="source", required=True, choices=SOURCES)
    parser.add_argument("--name", help="default: the folder's name")
    parser.add_argument("--plain", action="store_true", help="match prompts by their text")
    flags.add_root(parser)


def run(options: argparse.Namespace) -> int:
    """Import a dump, and print what it has."""
    from flows.reading import external  # takes two seconds
    from tasks.train.external.imports import import_rollouts

    root, folder = roots.existing(options.data), Path(options.folder)
    name = options.name or folder.name
    if not re.fullmatch(r"\w[\w.-]*", name):
        raise ParamsError(f"--name {name}: use letters, digits, dots, dashes and underscores")
    found = import_rollouts(
        root.layout, root.values, options.source, folder, name, is_plain=options.plain
    )
    numbers = found.numbers()
    print(
        f"external/{name}: {numbers['num_rollouts']} rollouts of {numbers['num_prompts']} prompts "
        f"in {numbers['num_steps']} steps; {numbers['outcomes'].get('correct', 0)} correct"
    )
    print(
        f"{options.source}'s score differs from the verdict here in {found.num_differing} of "
        f"{found.num_scored} rollouts"
    )
    for line in found.differing:
        print(f"  {line}")
    print(external.show(root.layout, root.values))
    return 0
