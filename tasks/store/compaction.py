"""Many small shards into few large ones, while others read and write, and whatever kills it.

A compacted shard is created first, read back and checked; only then what it covers is removed. A
reader that lists in between sees both and reads the compacted one. One that listed before finds a
shard gone, and looks again. Adjacent shards only are merged, in their order, and each place before
the end is taken already, so nothing can come to lie inside a compacted span: every key keeps its
owner's row. What a kill leaves is covered, read by nobody, and removed by the next compaction."""

import logging

import polars as pl

from tasks.common.artifacts import STORE
from tasks.common.locations import reaching
from tasks.store import shards
from tasks.store.folder import RolloutStore
from tasks.store.shards import KEYS, MAX_BYTES, Span

logger = logging.getLogger(__name__)

MANY = 32  # shards that would go into one: from here on a stage that has sampled compacts by itself


def sizes(store: RolloutStore) -> dict[Span, int]:
    """The shards to read, in order, with their bytes."""
    return {span: int(store.files.size(store.path(span)) or 0) for span in store.spans()}


def plan(sizes: dict[Span, int], max_bytes: int = MAX_BYTES) -> list[list[Span]]:
    """Runs of two and more adjacent shards that are to become one, each within `max_bytes`."""
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
    """Merge every run of `at_least` shards and remove what was merged; the number of shards that
    were.

    Where another compaction is at work on the same shards, one of them steps back.
    """
    with reaching(store.location):
        try:
            runs = [run for run in plan(sizes(store)) if len(run) >= at_least]
            for run in runs:
                merge(store, run)
            return sum(map(len, runs))
        except FileNotFoundError:
            logger.info("%s is being compacted by another process", store.location)
            return 0


def merge(store: RolloutStore, run: list[Span]) -> None:
    """One run into one shard. Raises FileNotFoundError when another compaction was faster."""
    parts = [part for span in run if (part := store.load(span, list(STORE.columns))) is not None]
    if not parts:
        return
    merged = Span(run[0].first, run[-1].last)
    rows = pl.concat(parts).unique(KEYS, keep="first", maintain_order=True)
    store.create(merged.name, shards.encode(rows))
    remove_covered(store, merged)


def remove_covered(store: RolloutStore, by: Span) -> None:
    """Remove the shards that `by` stands for, if it is there and whole."""
    if store.load(by, KEYS) is None:
        return
    for span in covered(store.names(), by):
        store.remove(span.name)


def covered(names: list[str], by: Span) -> list[Span]:
    """The shards, damaged ones left out, whose rows the compacted shard `by` holds."""
    spans = [parsed[0] for name in names if (parsed := shards.parse(name)) and not parsed[1]]
    return [span for span in spans if span != by and by.covers(span)]
