"""python -m tasks.store.admin {ls,stat,verify,gc}: inspect and maintain the rollout store.

python -m tasks.store.admin ls                      the store of params.yaml and data/
python -m tasks.store.admin stat --location s3://bucket/prefix
python -m tasks.store.admin verify                  read everything; status 1 if anything is damaged
python -m tasks.store.admin gc --dry-run            what would be compacted and removed
python -m tasks.store.admin gc --policy 3f2a9c...   remove everything sampled for a policy
"""

import argparse
import dataclasses
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tasks.common import params
from tasks.common.artifacts import Layout
from tasks.common.files import ArtifactError
from tasks.common.locations import open_location, reaching
from tasks.store.admin import maintenance
from tasks.store.folder import RolloutStore, location
from tasks.store.settings import StoreSettings


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tasks.store.admin",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=["ls", "stat", "verify", "gc"])
    parser.add_argument(
        "--params",
        type=Path,
        default=Path("params.yaml"),
        help="parameter file, for its `store.location`",
    )
    parser.add_argument(
        "--data",
        type=Path,
        default=Path("data"),
        help="data root, used when `store.location` is null",
    )
    parser.add_argument("--location", help="another store: a folder or s3://bucket/prefix")
    parser.add_argument(
        "--policy",
        action="append",
        default=[],
        metavar="DIGEST",
        help="this policy only (repeatable)",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="gc: print what would be done, and do nothing"
    )
    return parser.parse_args()


def main() -> int:
    """Return 0, or 1 with a message when something is damaged or cannot be read."""
    options = parse()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    try:
        settings = params.section(params.load(options.params), "store", StoreSettings)
        if options.location:
            settings = dataclasses.replace(settings, location=options.location)
        root = location(settings, Layout(options.data))
        with reaching(root):
            files, path = open_location(root)
            print(root)
            return int(
                COMMANDS[options.command](
                    list(maintenance.folders(files, path, options.policy)), options
                )
            )
    except (params.ParamsError, ArtifactError) as error:
        print(error, file=sys.stderr)
        return 1


def ls(folders: list[RolloutStore], options: argparse.Namespace) -> bool:
    for policy, store in by_policy(folders):
        found = maintenance.summarize(store)
        print(
            f"{policy}  {maintenance.describe(store)}: {found.num_rollouts:,} rollouts of "
            f"{found.num_prompts:,} prompts"
        )
    return False


def stat(folders: list[RolloutStore], options: argparse.Namespace) -> bool:
    for policy, store in by_policy(folders):
        found = maintenance.summarize(store)
        print(f"\npolicy    {policy}")
        print(f"sampling  {maintenance.describe(store)}")
        print(f"folder    {store.folder}")
        print(
            f"rollouts  {found.num_rollouts:,}: {found.num_prompts:,} prompts, {found.fewest} to "
            f"{found.most} samples"
        )
        print(f"shards    {found.num_shards:,}, {maintenance.megabytes([found.num_bytes])}", end="")
        print(
            f"; for gc: {found.num_damaged} damaged, {found.num_covered} compacted"
            * needs_gc(found)
        )
        for row in maintenance.totals(store).iter_rows(named=True):
            print(
                f"sampled   {row['engine']} {row['engine_version']}: {row['rollouts']:,} rollouts, "
                f"{row['completion_tokens']:,} tokens, {row['flops']:.3g} FLOPs, "
                f"{row['seconds']:,.0f} s"
            )
    return False


def verify(folders: list[RolloutStore], options: argparse.Namespace) -> bool:
    found = [damage for store in folders for damage in maintenance.find_damaged(store)]
    for path, fault in found:
        print(f"DAMAGED {path}: {fault}")
    if found:
        print(
            "the next stage that needs these rows sets the shards aside and samples them again; "
            "`gc` removes shards that were set aside"
        )
    else:
        print("no shard is damaged")
    return bool(found)


def gc(folders: list[RolloutStore], options: argparse.Namespace) -> bool:
    action = maintenance.remove_folder if options.policy else maintenance.collect_garbage
    lines = [
        line
        for store in folders
        for line in show(action(store, dry_run=options.dry_run), options.dry_run)
    ]
    if not lines:
        print("nothing to do")
    return False


def show(lines: Iterator[str], dry_run: bool) -> Iterator[str]:
    for line in lines:
        print(f"would {line}" if dry_run else line, flush=True)
        yield line


def by_policy(folders: list[RolloutStore]) -> Iterator[tuple[str, RolloutStore]]:
    if not folders:
        print("empty")
    for store in folders:
        yield store.folder.rsplit("/", 2)[-2], store


def needs_gc(found: Any) -> bool:
    return bool(found.num_damaged or found.num_covered)


COMMANDS = {"ls": ls, "stat": stat, "verify": verify, "gc": gc}

if __name__ == "__main__":
    sys.exit(main())
