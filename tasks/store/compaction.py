"""Merge many small shards into a few large ones. This is safe with concurrent readers and writers,
and after a kill.

A compacted shard is first created, read back and checked. Only then are the shards that it covers
removed. A reader that lists in between sees both and reads the compacted one. A reader that listed
before finds that a shard is gone, and lists again. Only adjacent shards are merged, in order, and
every sequence number before the end is used, so no new shard can appear inside a compacted span,
and every key keeps its row. After a kill, covered shards may remain. No reader uses them. A
compaction that merges their span again removes them, and so does `winnow store gc`."""

import logging

import polars as pl

from tasks.common.artifacts import STORE
from tasks.common.locations import reaching
from tasks.store import shards
from tasks.store.folder import RolloutStore
from tasks.store.shards import KEYS, MAX_BYTES, Span

logger = logging.getLogger(__name__)

# a stage compacts the store after sampling if at least this many shards would become one
AUTOMATIC_FROM = 32


def sizes(store: RolloutStore) -> dict[Span, int]:
    """Return the shards to read, in order, with their sizes in bytes."""
    return {span: int(store.files.size(store.path(span)) or 0) for span in store.spans()}


def plan(sizes: dict[Span, int], max_bytes: int = MAX_BYTES) -> list[list[Span]]:
    """Return runs of two or more adjacent shards to merge into one shard each, within
    `max_bytes`."""
    runs: list[list[Span]] = [[]]
    room = max_bytes
    for span, size in sizes.items():
        if size > room and runs[-1]:
            runs.append([])
            room = max_bytes
        runs[-1].append(span)
        room -= size
    return [run for run in runs if len(run) > 1]


def compact(store: RolloutStore, at_least: int = 2) -> None:
    """Merge every run of at least `at_least` shards, and remove the originals.

    If two compactions of the same shards run at once, one stops."""
    with reaching(store.location):
        try:
            for run in plan(sizes(store)):
                if len(run) >= at_least:
                    merge(store, run)
        except FileNotFoundError:
            logger.info("another process is compacting %s", store.location)


def merge(store: RolloutStore, run: list[Span]) -> None:
    """Merge a run into one shard. Raise FileNotFoundError if another compaction has removed some
    of its shards."""
    parts = [part for span in run if (part := store.load(span, list(STORE.columns))) is not None]
    if not parts:
        return
    # the first row of a duplicate key wins, as for readers
    merged = Span(run[0].first, run[-1].last)
    rows = pl.concat(parts).unique(KEYS, keep="first", maintain_order=True)
    store.create(merged.name, shards.encode(rows))
    remove_covered(store, merged)


def remove_covered(store: RolloutStore, by: Span) -> None:
    """Remove the shards that the compacted shard `by` covers, if it is present and undamaged."""
    if store.load(by, KEYS) is None:
        return
    for span in covered(store.names(), by):
        store.remove(span.name)


def covered(names: list[str], by: Span) -> list[Span]:
    """Return the undamaged shards whose rows are all in the compacted shard `by`."""
    spans = [parsed[0] for name in names if (parsed := shards.parse(name)) and not parsed[1]]
    return [span for span in spans if span != by and by.covers(span)]
