"""winnow import FOLDER --from TRAINER: reads the rollouts that another trainer dumped.
winnow import FOLDER --checkpoint: evaluates a policy that another trainer saved.

Rollouts are matched with this root's prompts by the ground truth that `winnow export` wrote (with
--plain, and where the trainer dumps none, by the prompt's text), graded again by the root's
verifiers, and stored as external/NAME/rollouts.parquet. Rollouts whose score differs from the
trainer's are shown.

A checkpoint is a Hugging Face folder with safetensors and the policy's tokenizer. It is evaluated
on the test prompts as external/NAME, like the initial policy. The report's page has a row for each
import."""

import argparse
import re
from pathlib import Path

from flows.cli import flags
from flows.pipeline import roots
from flows.pipeline.roots import Root
from tasks.common.params import ParamsError

SOURCES = ("areal", "open_instruct", "trl", "verifiers", "verl")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="FOLDER", type=flags.location)
    kind = parser.add_mutually_exclusive_group(required=True)
    kind.add_argument("--from", dest="source", choices=SOURCES, help="the trainer of a dump")
    kind.add_argument("--checkpoint", action="store_true", help="evaluate the policy in FOLDER")
    parser.add_argument("--name", help="default: the folder's name")
    parser.add_argument("--plain", action="store_true", help="match prompts by their text")
    flags.add_root(parser)


def run(options: argparse.Namespace) -> int:
    """Import a dump or a checkpoint, and print what it has."""
    from flows.reading import external  # takes two seconds

    root, folder = roots.existing(options.data), Path(options.folder)
    name = options.name or folder.name
    if not re.fullmatch(r"\w[\w.-]*", name):
        raise ParamsError(f"--name {name}: use letters, digits, dots, dashes and underscores")
    if options.checkpoint and options.plain:
        raise ParamsError("--plain matches rollouts with prompts: omit it with --checkpoint")
    if options.checkpoint:
        print(external.evaluate(root.layout, root.values, folder, name))
    else:
        import_dump(root, folder, name, options)
    print(external.show(root.layout, root.values))
    return 0


def import_dump(root: Root, folder: Path, name: str, options: argparse.Namespace) -> None:
    """Import a dump, and print its counts and some of the rollouts that were scored otherwise."""
    from tasks.train.external.imports import import_rollouts  # takes two seconds

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
