"""Merge many small shards into few large ones, safely beside other readers and writers and under
kills.

A compacted shard is first created, read back and checked; only then are the shards that it covers
removed. A reader that lists in between sees both and reads the compacted one. A reader that listed
before finds a shard gone, and lists again. Only adjacent shards are merged, in their order, and
every sequence number before the end is taken, so no new shard can appear inside a compacted span:
every key keeps its row. After a kill, covered shards may remain; nobody reads them, and the next
compaction removes them."""

import logging

import polars as pl

from tasks.common.artifacts import STORE
from tasks.common.locations import reaching
from tasks.store import shards
from tasks.store.folder import RolloutStore
from tasks.store.shards import KEYS, MAX_BYTES, Span

logger = logging.getLogger(__name__)

# a stage that has sampled compacts the store where at least so many shards would become one
AUTOMATIC_FROM = 32


def sizes(store: RolloutStore) -> dict[Span, int]:
    """Return the shards to read, in order, with their bytes."""
    return {span: int(store.files.size(store.path(span)) or 0) for span in store.spans()}


def plan(sizes: dict[Span, int], max_bytes: int = MAX_BYTES) -> list[list[Span]]:
    """Return runs of two or more adjacent shards that should become one shard, each within
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


def compact(store: RolloutStore, at_least: int = 2) -> int:
    """Merge every run of `at_least` shards and remove the originals. Return the number of shards
    merged.

    Of two compactions of the same shards at once, one stops."""
    with reaching(store.location):
        try:
            runs = [run for run in plan(sizes(store)) if len(run) >= at_least]
            for run in runs:
                merge(store, run)
            return sum(map(len, runs))
        except FileNotFoundError:
            logger.info("another process is compacting %s", store.location)
            return 0


def merge(store: RolloutStore, run: list[Span]) -> None:
    """Merge a run into one shard. Raises FileNotFoundError when another compaction has removed some
    of it."""
    # every undamaged shard of the run, as it is
    parts = [part for span in run if (part := store.load(span, list(STORE.columns))) is not None]
    if not parts:
        return
    # of a duplicate key the first row wins, as it does for readers
    merged = Span(run[0].first, run[-1].last)
    rows = pl.concat(parts).unique(KEYS, keep="first", maintain_order=True)
    # create, then remove what it covers
    store.create(merged.name, shards.encode(rows))
    remove_covered(store, merged)


def remove_covered(store: RolloutStore, by: Span) -> None:
    """Remove the shards that the compacted shard `by` covers, if it is present and undamaged."""
    if store.load(by, KEYS) is None:
        return
    for span in covered(store.names(), by):
        store.remove(span.name)


def covered(names: list[str], by: Span) -> list[Span]:
    """Return the undamaged shards whose rows the compacted shard `by` holds."""
    spans = [parsed[0] for name in names if (parsed := shards.parse(name)) and not parsed[1]]
    return [span for span in spans if span != by and by.covers(span)]
