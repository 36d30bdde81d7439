"""Maintenance of a store: summaries of its content, checks for damage, and removal of files.

Nothing here changes a profile. Only these are removed: shards that a compacted shard contains,
damaged shards, files of killed writers, and the rollouts of policies that the user names."""

import json
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import polars as pl

from tasks.common.artifacts import STORE
from tasks.common.checksums import DamagedError
from tasks.common.files import ArtifactError, digest
from tasks.store import compaction, shards
from tasks.store.folder import DESCRIPTION, RolloutStore
from tasks.store.shards import KEYS, Span


@dataclass(frozen=True)
class Summary:
    """Counts of a folder of shards. `fewest` and `most` are numbers of samples per prompt."""

    num_prompts: int
    num_rollouts: int
    fewest: int
    most: int
    num_shards: int
    num_bytes: int
    num_damaged: int
    num_covered: int


def folders(files: Any, root: str, policies: Sequence[str] = ()) -> Iterator[RolloutStore]:
    """Yield every folder of shards under `root`, or only the folders of `policies`. Raise
    ArtifactError with the name of a policy without folders."""
    known = [path.rsplit("/", 1)[-1] for path in subfolders(files, root)]
    if unknown := [policy for policy in policies if policy not in known]:
        raise ArtifactError(
            f"{root} has no rollouts of policy {unknown[0]}; choose from: "
            f"{', '.join(known) or 'none, it is empty'}"
        )
    for policy in dict.fromkeys(policies) or known:
        yield from (RolloutStore(files, path) for path in subfolders(files, f"{root}/{policy}"))


def subfolders(files: Any, folder: str) -> list[str]:
    """Return the paths of the folders directly under `folder`."""
    with suppress(FileNotFoundError):
        entries = files.ls(folder, detail=True)
        return sorted(
            entry["name"].rstrip("/") for entry in entries if entry["type"] == "directory"
        )
    return []


def describe(store: RolloutStore) -> str:
    """Return the sampling parameters of a folder in words, from the file of its first writer. The
    folder's name is the digest of these parameters."""
    name = store.folder.rsplit("/", 1)[-1]
    try:
        sampling = json.loads(store.files.cat_file(f"{store.folder}/{DESCRIPTION}"))["sampling"]
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return f"{name} (no {DESCRIPTION})"
    if digest(sampling) != name:
        return f"{name} (its {DESCRIPTION} is damaged: delete it, the next writer recreates it)"
    return ", ".join(f"{key} {value}" for key, value in dict(sampling).items())


def summarize(store: RolloutStore) -> Summary:
    """Return a summary from the key columns. Duplicate keys count once."""
    sizes = store.retry(lambda: compaction.sizes(store))
    by_prompt = gather(store, KEYS).group_by("prompt_digest")
    samples = by_prompt.agg(pl.col("sample_index").n_unique())["sample_index"]
    fewest, most = (int(str(samples.min())), int(str(samples.max()))) if len(samples) else (0, 0)
    counts = (len(samples), int(samples.sum()), fewest, most)
    return Summary(
        *counts, len(sizes), sum(sizes.values()), store.num_damaged(), len(list(covered(store)))
    )


def totals(store: RolloutStore) -> pl.DataFrame:
    """Return a row per engine: its rollouts, and their tokens, FLOPs and seconds. Duplicates count,
    because sampling them had a cost."""
    rows = gather(store, ["engine", "engine_version", "completion_tokens", "flops", "seconds"])
    return (
        rows.group_by("engine", "engine_version")
        .agg(
            pl.len().alias("rollouts"),
            pl.col("completion_tokens").cast(pl.Int64).sum(),
            pl.sum("flops", "seconds"),
        )
        .sort("engine", "engine_version")
    )


def gather(store: RolloutStore, columns: Sequence[str]) -> pl.DataFrame:
    """Return some columns of all shards."""
    empty = STORE.frame([]).select(columns)
    return store.retry(
        lambda: pl.concat([empty, *[store.scan(span, columns) for span in store.spans()]])
    )


def find_faults(store: RolloutStore) -> Iterator[str]:
    """Yield a line for every shard that is damaged, also if it was set aside, or unreadable for
    another reason. Read every shard, and change nothing."""
    for name in store.names():
        path = f"{store.folder}/{name}"
        parsed = shards.parse(name)
        if parsed and parsed[1]:
            yield f"DAMAGED {path}: set aside earlier"
        elif parsed:
            with suppress(FileNotFoundError):  # compacted since the listing
                try:
                    store.read(parsed[0], list(STORE.columns))
                except ArtifactError as error:
                    is_damaged = isinstance(error, DamagedError)
                    yield f"DAMAGED {path}: {error}" if is_damaged else str(error)


def covered(store: RolloutStore) -> Iterator[tuple[Span, Span]]:
    """Yield pairs of a shard and the compacted shard that contains its rows. Covered shards remain
    if a compaction is killed before it removes them."""
    names = store.names()
    for by in store.spans():
        yield from ((span, by) for span in compaction.covered(names, by))


def collect_garbage(store: RolloutStore, *, dry_run: bool) -> Iterator[str]:
    """Compact the store and remove unused files. Yield a line before each action, except the
    removal of temporary files of killed writers."""
    if not dry_run:
        store.tidy()
    for name in store.names():
        if name.endswith(".damaged"):
            yield f"remove {store.folder}/{name} (damaged)"
            if not dry_run:
                store.remove(name)
    compacted = set()
    for span, by in list(covered(store)):
        yield f"remove {store.path(span)} (its rows are in {by.name})"
        compacted.add(by)
    for by in set() if dry_run else compacted:
        compaction.remove_covered(store, by)
    sizes = store.retry(lambda: compaction.sizes(store))
    for run in compaction.plan(sizes):
        yield (
            f"merge {len(run)} shards of {store.folder} ({megabytes(sizes[span] for span in run)}) "
            "into one"
        )
    if not dry_run:
        compaction.compact(store)


def remove_folder(store: RolloutStore, *, dry_run: bool) -> Iterator[str]:
    """Remove a folder with its content. Yield a line before the removal."""
    yield (
        f"remove {store.folder} ({describe(store)}; {megabytes(compaction.sizes(store).values())})"
    )
    if not dry_run:
        store.files.rm(store.folder, recursive=True)


def megabytes(sizes: Iterable[int]) -> str:
    """Return the sum of sizes in bytes as text in MB."""
    return f"{sum(sizes) / 1e6:,.1f} MB"
