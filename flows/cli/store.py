"""winnow store {stat,verify,gc}: inspect and maintain the rollout store.

winnow store stat                     its policies, sampling parameters, rollouts, bytes and cost
winnow store verify                   read everything; status 1 if something is damaged
winnow store gc --dry-run             what would be compacted and removed
winnow store gc --policy 3f2a9c...    remove everything sampled for a policy"""

import argparse
import importlib

from flows.cli import flags
from flows.pipeline import roots
from tasks.common import params


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("command", choices=("stat", "verify", "gc"))
    other = "another store: a folder or s3://bucket/prefix"
    parser.add_argument("--location", help=other, type=flags.location)
    flags.add_several(parser, "--policy", metavar="DIGEST", help="only these policies")
    parser.add_argument("--dry-run", action="store_true", help="gc: only print the changes")
    flags.add_root(parser)


def run(options: argparse.Namespace) -> int:
    """Run the command on the configured store, or `--location`. Return 1 if it finds damage."""
    root = roots.existing(options.data)
    status: int = importlib.import_module("tasks.store.admin.commands").run(
        options.command,
        params.load(root.params),
        root.layout,
        place=options.location,
        policies=options.policy,
        dry_run=options.dry_run,
    )
    return status
