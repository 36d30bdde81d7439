"""The subcommands of `winnow store`: list, check and compact the rollout store."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from tasks.common import params
from tasks.common.artifacts import Layout
from tasks.common.locations import open_location, reaching
from tasks.store.admin import maintenance
from tasks.store.folder import RolloutStore, location
from tasks.store.settings import StoreSettings


def run(
    command: str,
    values: Mapping[str, Any],
    layout: Layout,
    *,
    place: str | None = None,
    policies: list[str],
    dry_run: bool = False,
) -> int:
    """Run `command` on the store that the parameters name, or on the one at `place`. Print the
    findings or actions. Return the exit status, which is 1 if `verify` found damage."""
    settings = params.section(values, "store", StoreSettings)
    root = location(dataclasses.replace(settings, location=place or settings.location), layout)
    with reaching(root):
        files, path = open_location(root)
        print(root)
        folders = list(maintenance.folders(files, path, policies))
        if not folders:
            print("empty")
        if command == "verify":
            return int(verify(folders))
        if command == "gc":
            gc(folders, bool(policies), dry_run)
        else:
            stat(folders)
    return 0


def stat(folders: list[RolloutStore]) -> None:
    """Print a summary of each folder."""
    for store in folders:
        sums = maintenance.summarize(store)
        print(f"\npolicy    {store.folder.rsplit('/', 2)[-2]}")
        print(f"sampling  {maintenance.describe(store)}")
        print(f"folder    {store.folder}")
        print(
            f"rollouts  {sums.num_rollouts:,}: {sums.num_prompts:,} prompts, "
            f"{sums.fewest} to {sums.most} samples"
        )
        print(f"shards    {sums.num_shards:,}, {maintenance.megabytes([sums.num_bytes])}", end="")
        if sums.num_damaged or sums.num_covered:
            print(f"; for gc: {sums.num_damaged} damaged, {sums.num_covered} compacted", end="")
        print()
        for row in maintenance.totals(store).iter_rows(named=True):
            print(
                f"sampled   {row['engine']} {row['engine_version']}: {row['rollouts']:,} rollouts, "
                f"{row['completion_tokens']:,} tokens, {row['flops']:.3g} FLOPs, "
                f"{row['seconds']:,.0f} s"
            )


def verify(folders: list[RolloutStore]) -> bool:
    """Read every shard, print the faults, and return whether there are any."""
    found = [fault for store in folders for fault in maintenance.find_faults(store)]
    print("\n".join(found) or "no shard is damaged")
    if any(fault.startswith("DAMAGED") for fault in found):
        print(
            "the next stage that needs these rows sets the shards aside and samples them again; "
            "`gc` removes shards that were set aside"
        )
    return bool(found)


def gc(folders: list[RolloutStore], is_whole: bool, dry_run: bool) -> None:
    """If `is_whole`, remove the folders, else compact and clean them. Print every action."""
    action = maintenance.remove_folder if is_whole else maintenance.collect_garbage
    is_done = False
    for store in folders:
        for line in action(store, dry_run=dry_run):
            print(f"would {line}" if dry_run else line, flush=True)
            is_done = True
    if not is_done:
        print("nothing to do")
