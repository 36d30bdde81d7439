"""winnow push RECIPE DESTINATION: publishes a policy with model card, recipe, plan and ledger.
winnow push FILE ... URI: sends records that an MLflow server has not received.

DESTINATION is hf://ORG/NAME (created as private if it does not exist; HF_TOKEN is the token),
s3://bucket/prefix, or a folder. FILE is a record in tracking/pending/; URI is http://... or
sqlite:///PATH."""

import argparse
from pathlib import Path

from flows.cli import flags
from flows.pipeline import roots
from flows.publishing import policy
from flows.upkeep import places
from tasks.common import params, tracking
from tasks.common.params import ParamsError
from tasks.common.redaction import without_secrets

RECORDS = ("http://", "https://", "sqlite://")  # prefixes of the address of a tracking server


def add_options(parser: argparse.ArgumentParser) -> None:
    what = "a recipe that has been trained and evaluated, or records"
    parser.add_argument("what", metavar="RECIPE|FILE", nargs="+", help=what, type=recipe_or_file)
    places = "hf://, s3://, a folder, or URI"
    parser.add_argument("destination", metavar="DESTINATION", help=places, type=flags.location)
    parser.add_argument("--overwrite", action="store_true", help="replace the policy there")
    flags.add_cell(parser)


def recipe_or_file(text: str) -> str:
    """Return a recipe's name unchanged, or the absolute path of a record (.jsonl)."""
    return flags.location(text) if text.endswith(".jsonl") else text


def run(options: argparse.Namespace) -> int:
    """Push a policy and print the names of its files, or send records to a tracking server."""
    if options.destination.startswith(RECORDS):
        return replay(list(map(Path, options.what)), options.destination)
    if len(options.what) > 1:
        raise ParamsError("a destination needs exactly one recipe")
    root = roots.existing(options.data)
    cell = (options.what[0], flags.seed_of(options, params.load(root.params)))
    names = policy.push(root.layout, *cell, options.destination, overwrite=options.overwrite)
    places.note_pushed(root, *cell)
    print(f"{cell[0]}/{cell[1]} is at {options.destination}: {', '.join(names)}")
    return 0


def replay(paths: list[Path], uri: str) -> int:
    """Send records to the tracking server at `uri`. Return 0, or raise ParamsError if one fails."""
    for path in paths:
        try:
            print(without_secrets(f"{path} is run {tracking.replay(path, uri)} at {uri}"))
        except Exception as error:  # MLflow's client raises errors of many libraries
            raise ParamsError(f"{path} cannot be replayed: {error}") from error
    return 0
