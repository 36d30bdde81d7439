"""Compaction of the store under readers, writers and kills."""

import random
from pathlib import Path
from typing import Any

import polars as pl
from hypothesis import given
from hypothesis import strategies as st

from tasks.common.artifacts import STORE
from tasks.store import compaction, shards
from tasks.store.admin import maintenance
from tasks.store.folder import RolloutStore, is_local
from tasks.store.shards import Span
from tasks.store.view import StoreView
from tests.store.conftest import damage, owners, reopened, rows


def first_rows(found: dict[Span, pl.DataFrame]) -> dict[Any, str]:
    owner: dict[Any, str] = {}
    for span in sorted(found):
        for key_and_text in found[span].select(*shards.KEYS, "text").iter_rows():
            owner.setdefault(key_and_text[:2], key_and_text[2])
    return owner


def test_overlapping_compactions_are_merged(store: RolloutStore) -> None:
    """Two machines with different views of the folder write overlapping shards, which are then
    merged."""
    for n in range(6):
        store.append(rows([("a", n % 4), ("b", n)], f"shard {n}"))
    keys = [(p, i) for p in "ab" for i in range(6)]
    expected = owners(store, keys)
    singles = store.spans()
    left = [store.load(span, list(STORE.columns)) for span in singles[:2]]
    right = [store.load(span, list(STORE.columns)) for span in singles[1:5]]
    for span, parts in ((Span(0, 1), left), (Span(1, 4), right)):
        merged = pl.concat([part for part in parts if part is not None]).unique(
            shards.KEYS, keep="first"
        )
        store.create(span.name, shards.encode(merged))
    assert owners(store, keys) == expected
    assert store.spans() == [Span(0, 1), Span(1, 4), Span(5, 5)]
    compaction.compact(store)
    assert store.spans() == [Span(0, 5)]
    assert [name for name in store.names() if name.endswith(".parquet")] == [Span(0, 5).name]
    assert owners(store, keys) == expected


def test_missing_keys_of_a_part_equal_those_of_the_whole(store: RolloutStore) -> None:
    """A stage looks up the keys of each batch, while others append, damage and compact."""
    rng, keys = random.Random(0), [(p, i) for p in "abc" for i in range(4)]
    wanted = rows(keys, "").select(shards.KEYS)
    long_lived = StoreView(store, wanted)
    for number in range(8):
        store.append(rows(rng.sample(keys, 3), f"shard {number}"))
        if number == 4:
            damage(store, store.spans()[1])
            assert store.load(store.spans()[1], shards.KEYS) is None
        if number in (2, 6):
            compaction.compact(reopened(store))
        requested = wanted[sorted(rng.sample(range(len(keys)), 5))]
        stored = {*owners(reopened(store), keys)}
        missing = [key for key in requested.rows() if key not in stored]
        assert long_lived.missing(requested).rows() == missing
        assert StoreView(reopened(store), wanted).missing(requested).rows() == missing
    assert 0 < len(long_lived.missing(wanted)) < len(keys)


def test_rows_are_read_once_during_compaction_and_damage(store: RolloutStore) -> None:
    for n in range(4):
        store.append(rows([("a", n)], f"shard {n}"))
    view = StoreView(store, rows([("a", n) for n in range(4)], "").select(shards.KEYS))
    parts = view.parts(["text"])
    assert next(parts)["text"].to_list() == ["shard 0"]
    damage(store, Span(2, 2))
    assert next(parts)["text"].to_list() == ["shard 1"]
    compaction.compact(reopened(store))
    assert [part["text"].to_list() for part in parts] == [["shard 3"]]
    assert list(view.parts(["text"])) == []
    store.append(rows([("a", 2), ("a", 1)], "sampled again"))
    [part] = view.parts(["text"])
    assert part.rows() == [("a", 2, "sampled again")]
    assert view.unread.is_empty()


def test_rows_of_a_slow_writer_survive_a_compaction(store: RolloutStore) -> None:
    """The writer finds place 1 free, because others filled and compacted it in the meantime."""
    store.append(rows([("a", 0)], "first"))

    class Sleeper(RolloutStore):
        listed = False

        def names(self) -> list[str]:
            found = super().names()
            if not self.listed and "sampling.json" in found and self.description is None:
                self.listed = True
                others = reopened(store)
                for n in range(1, 4):
                    others.append(rows([("a", n)], f"other {n}"))
                compaction.compact(others)
            return found

    sleeper = Sleeper(store.files, store.folder, {"policy": "p"})
    sleeper.append(rows([("a", 3), ("late", 0)], "sleeper"))
    assert store.spans() == [Span(0, 3), Span(4, 4)]
    assert owners(store, [("a", 3), ("late", 0)]) == {("a", 3): "other 3", ("late", 0): "sleeper"}


def test_damaged_compacted_shard_removes_nothing(store: RolloutStore) -> None:
    for n in range(3):
        store.append(rows([("a", n)], f"shard {n}"))
    parts = [store.load(span, list(STORE.columns)) for span in store.spans()]
    content = bytearray(shards.encode(pl.concat([part for part in parts if part is not None])))
    content[50] ^= 1
    store.create(Span(0, 2).name, bytes(content))
    compaction.remove_covered(store, Span(0, 2))  # it must not trust the damaged shard
    assert owners(store, [("a", n) for n in range(3)]) == {("a", n): f"shard {n}" for n in range(3)}


def test_plan_merges_small_shards_only() -> None:
    sizes = {Span(0, 9): 60, **{Span(n, n): 10 for n in range(10, 20)}}
    assert compaction.plan(sizes, max_bytes=64) == [
        [Span(n, n) for n in range(10, 16)],
        [Span(n, n) for n in range(16, 20)],
    ]
    assert compaction.plan({Span(0, 0): 100, Span(1, 1): 100}, max_bytes=64) == []


def test_gc_lists_its_actions_and_keeps_every_row(store: RolloutStore) -> None:
    keys = [("a", n) for n in range(5)]
    for n in range(5):
        store.append(rows([("a", n)], f"shard {n}"))
    damage(store, Span(4, 4))
    if is_local(store.files):
        Path(store.folder, ".killed.unfinished").touch()
    before = owners(store, keys)
    planned, done = (
        list(maintenance.collect_garbage(store, dry_run=True)),
        list(maintenance.collect_garbage(store, dry_run=False)),
    )
    assert planned == done
    assert [line.split(" (")[0].rsplit("/", 1)[-1] for line in done[:1]] == [
        f"{Span(4, 4).name}.damaged"
    ]
    assert done[1].startswith("merge 4 shards of")
    assert owners(store, keys) == before == {("a", n): f"shard {n}" for n in range(4)}
    assert store.names() == [Span(0, 3).name, "sampling.json"]
    assert list(maintenance.collect_garbage(store, dry_run=False)) == []


@given(st.randoms(use_true_random=False), st.integers(3, 12))
def test_overlapping_or_killed_compactions_keep_every_owner(
    rng: random.Random, num_shards: int
) -> None:
    """Each key keeps its first row, however compacted spans overlap, and whichever covered shards
    have been removed."""
    keys = [("p", i) for i in range(6)]
    appended = {
        Span(n, n): rows(rng.sample(keys, rng.randint(1, 4)), f"shard {n}")
        for n in range(num_shards)
    }
    expected = first_rows(appended)
    present, views = dict(appended), [dict(appended)]
    for _ in range(rng.randint(1, 4)):
        view = rng.choice(views)  # this machine's view, perhaps older than the work of the others
        run = shards.live(view)
        if len(run) < 2:
            break
        first = rng.randint(0, len(run) - 2)
        last = rng.randint(first + 1, len(run) - 1)
        merged = Span(run[first].first, run[last].last)
        inside = [view[span] for span in run[first : last + 1]]
        present[merged] = pl.concat(inside).unique(shards.KEYS, keep="first", maintain_order=True)
        covered = [span for span in present if merged.covers(span) and span != merged]
        for span in rng.sample(covered, rng.randint(0, len(covered))):
            del present[span]
        views.append(dict(present))
        assert first_rows({span: present[span] for span in shards.live(present)}) == expected
