"""winnow clean: shows, and with --yes removes, what is old and not referenced.

These places grow: DVC's cache and run cache, MLflow's record, Prefect's database, checkpoints, the
rollout store and logs. Current outputs, the champion and pushed policies stay. The guide has a
table of what each place loses (Operating it, Cleaning)."""

import argparse
import time
from collections.abc import Iterator
from contextlib import contextmanager

from tabulate import tabulate

from flows.cli import flags
from flows.pipeline import commands, request, status
from flows.upkeep import places


def add_options(parser: argparse.ArgumentParser) -> None:
    days = "keep everything of the last N days (default: %(default)s)"
    parser.add_argument("--days", type=flags.count(0), default=30, metavar="N", help=days)
    parser.add_argument("--yes", action="store_true", help="remove it")


def run(options: argparse.Namespace) -> int:
    """Print a row for every place, and remove what the rows state if asked to. Return 0."""
    with alone():
        found = list(places.examine(time.time() - options.days * 86_400))
        rows = [[one.name, one.num, one.things, one.size / 1e6] for one in found]
        print(tabulate(rows, ["", "removes", "", "MB"], floatfmt=",.1f"), flush=True)
        if not options.yes:
            print("nothing was removed; `winnow clean --yes` removes it, with the same options")
        for place in found if options.yes else ():
            place.remove()
    return 0


@contextmanager
def alone() -> Iterator[None]:
    """Keep flows and dvc from starting during the block. Raise CommandError if a dvc runs a stage:
    it notes its process and releases its lock meanwhile."""
    with request.locked(), commands.whole_lock():
        for pid in status.of_dvc():
            raise commands.CommandError(f"dvc runs a stage (process {pid}): wait for its end")
        yield
