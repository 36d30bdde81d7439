"""python -m tasks.store {ls,stat,verify,gc}: look after the rollout store.

python -m tasks.store ls                        the store of params.yaml and data/
python -m tasks.store stat --location s3://bucket/prefix
python -m tasks.store verify                    reads everything; status 1 when something is damaged
python -m tasks.store gc --dry-run              what would be compacted and removed
python -m tasks.store gc --policy 3f2a9c...     forget all that was sampled for a policy
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
from tasks.store.admin import upkeep
from tasks.store.folder import RolloutStore, StoreSettings, location


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tasks.store",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("command", choices=["ls", "stat", "verify", "gc"])
    parser.add_argument(
        "--params",
        type=Path,
        default=Path("params.yaml"),
        help="parameter file; its `store.location`",
    )
    parser.add_argument(
        "--data", type=Path, default=Path("data"), help="data root, where `store.location` is null"
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
        "--dry-run", action="store_true", help="gc: say what would be done, and do nothing"
    )
    return parser.parse_args()


def main() -> int:
    """0; 1 with a message when something is damaged or cannot be read."""
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
                    list(upkeep.folders(files, path, options.policy)), options
                )
            )
    except (params.ParamsError, ArtifactError) as error:
        print(error, file=sys.stderr)
        return 1


def ls(folders: list[RolloutStore], options: argparse.Namespace) -> bool:
    for policy, store in by_policy(folders):
        found = upkeep.summarize(store)
        print(
            f"{policy}  {upkeep.describe(store)}: {found.num_rollouts:,} rollouts of "
            f"{found.num_prompts:,} prompts"
        )
    return False


def stat(folders: list[RolloutStore], options: argparse.Namespace) -> bool:
    for policy, store in by_policy(folders):
        found = upkeep.summarize(store)
        print(f"\npolicy    {policy}\nsampling  {upkeep.describe(store)}\nfolder    {store.folder}")
        print(
            f"rollouts  {found.num_rollouts:,}: {found.num_prompts:,} prompts, {found.fewest} to "
            f"{found.most} samples"
        )
        print(f"shards    {found.num_shards:,}, {upkeep.megabytes([found.num_bytes])}", end="")
        print(
            f"; for gc: {found.num_damaged} damaged, {found.num_covered} compacted"
            * needs_gc(found)
        )
        for row in upkeep.totals(store).iter_rows(named=True):
            print(
                f"drawn by  {row['engine']} {row['engine_version']}: {row['rollouts']:,} rollouts, "
                f"{row['completion_tokens']:,} tokens, {row['flops']:.3g} FLOPs, "
                f"{row['seconds']:,.0f} s"
            )
    return False


def verify(folders: list[RolloutStore], options: argparse.Namespace) -> bool:
    found = [damage for store in folders for damage in upkeep.damages(store)]
    for path, fault in found:
        print(f"DAMAGED {path}: {fault}")
    if found:
        print(
            "what uses these rows sets them aside and samples them again; `gc` removes what was "
            "set aside"
        )
    else:
        print("every shard is what was written")
    return bool(found)


def gc(folders: list[RolloutStore], options: argparse.Namespace) -> bool:
    work = upkeep.forget if options.policy else upkeep.collect
    lines = [
        line
        for store in folders
        for line in say(work(store, dry_run=options.dry_run), options.dry_run)
    ]
    if not lines:
        print("nothing to do")
    return False


def say(lines: Iterator[str], dry_run: bool) -> Iterator[str]:
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
