"""The store alone: the order of shards, what a seal notices, compaction under readers, writers and
kills."""

import io
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.common import seal
from tasks.common.artifacts import STORE
from tasks.common.files import ArtifactError, digest
from tasks.common.locations import open_location
from tasks.store import compaction, folder, shards
from tasks.store.admin import maintenance
from tasks.store.folder import RolloutStore
from tasks.store.shards import Span
from tasks.store.view import StoreView


def rows(keys: list[tuple[str, int]], text: str) -> pl.DataFrame:
    return STORE.frame(
        [{**STORE.example, "prompt_digest": p, "sample_index": i, "text": text} for p, i in keys]
    )


def again(store: RolloutStore) -> RolloutStore:
    """The same folder for another process."""
    return RolloutStore(
        store.files, store.folder, {"policy": "p", "sampling": {"temperature": 1.0}}
    )


def damage(store: RolloutStore, span: Span) -> None:
    path = store.path(span)
    store.files.pipe_file(path, store.files.cat_file(path)[:-1])


def owners(store: RolloutStore, keys: list[tuple[str, int]]) -> dict[tuple[str, int], str]:
    """The text that each key has for a reader that comes now."""
    wanted = rows(keys, "").select("prompt_digest", "sample_index").unique(maintain_order=True)
    found = StoreView(store, wanted).read(["text"])
    assert not found.select("prompt_digest", "sample_index").is_duplicated().any()
    return {(p, i): text for p, i, text in found.iter_rows()}


@pytest.fixture(params=["folder", pytest.param("bucket", marks=pytest.mark.s3)])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> RolloutStore:
    root = str(tmp_path) if request.param == "folder" else request.getfixturevalue("bucket")
    files, path = open_location(root)
    return again(RolloutStore(files, f"{path}/policy/{digest({'temperature': 1.0})}"))


@pytest.fixture
def local(tmp_path: Path) -> RolloutStore:
    files, path = open_location(str(tmp_path))
    return again(RolloutStore(files, f"{path}/policy/{digest({'temperature': 1.0})}"))


def test_of_a_duplicate_key_the_first_shard_wins(store: RolloutStore) -> None:
    store.append(rows([("a", 0), ("a", 1)], "first"))
    store.append(rows([("a", 1), ("b", 0)], "second"))
    keys = [("a", 0), ("a", 1), ("b", 0), ("c", 0)]
    assert owners(store, keys) == {("a", 0): "first", ("a", 1): "first", ("b", 0): "second"}
    assert store.names()[:2] == ["0000000000-0000000000.parquet", "0000000001-0000000001.parquet"]


def test_a_shard_is_plain_parquet_and_any_flipped_bit_is_noticed() -> None:
    content = shards.encode(rows([("a", 0)], f"{seal.KEY} imitated {'0' * 64}"))
    assert shards.decode(content, ["text"], "x")["text"][0].startswith(seal.KEY)
    for place in range(len(content)):
        damaged = bytearray(content)
        damaged[place] ^= 1
        with pytest.raises(seal.DamagedError):
            seal.verify(io.BytesIO(damaged))
    for length in range(len(content)):
        with pytest.raises(seal.DamagedError):
            seal.verify(io.BytesIO(content[:length]))


def test_whatever_a_damaged_footer_makes_of_a_scan_the_shard_is_set_aside(
    local: RolloutStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Readers fail in many ways, some with what is no Exception; a scan that succeeds is checked
    when values are read."""
    monkeypatch.setattr(folder, "READ_WAITS", (0.0, None))
    content = shards.encode(rows([("a", 0), ("a", 1)], "x"))
    footer = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    local.append(rows([("a", 0), ("a", 1)], "x"))
    path, random_ = Path(local.path(Span(0, 0))), random.Random(0)
    for _ in range(400):
        damaged = bytearray(content)
        damaged[random_.randrange(footer, len(content))] ^= 1 << random_.randrange(8)
        path.write_bytes(damaged)
        store = again(local)
        store.scan(Span(0, 0))
        if not store.damaged:
            assert store.load(Span(0, 0), ["text"]) is None
        assert [name for name in local.names() if "parquet" in name] == [path.name + ".damaged"]


def test_a_panic_of_the_reader_leads_to_the_seal(
    local: RolloutStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    local.append(rows([("a", 0)], "x"))

    def panics(*_: Any, **__: Any) -> pl.DataFrame:
        raise pl.exceptions.PanicException("index out of bounds")

    with monkeypatch.context() as patched:
        patched.setattr(pl, "read_parquet", panics)
        with pytest.raises(ArtifactError, match=r"is undamaged, but .*index out of bounds"):
            local.scan(Span(0, 0))
    damage(local, Span(0, 0))
    assert local.scan(Span(0, 0)).is_empty()
    assert local.num_damaged() == 1


def short_once(read: Callable[[str], bytes]) -> Callable[[str], bytes]:
    """A read of which the first ends early."""
    reads: list[str] = []

    def shorter(path: str) -> bytes:
        reads.append(path)
        return read(path)[: -9 if len(reads) == 1 else None]

    return shorter


def test_a_read_that_ends_early_is_tried_again_and_sets_nothing_aside(
    local: RolloutStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    local.append(rows([("a", 0)], "x"))
    read = local.files.cat_file
    monkeypatch.setattr(local.files, "cat_file", short_once(read), raising=False)
    found = local.load(Span(0, 0), ["text"])
    assert found is not None
    assert found["text"].to_list() == ["x"]
    answers = iter([ConnectionResetError(), read(local.path(Span(0, 0)))])

    def fails_once(_: str) -> bytes:
        answer = next(answers)
        if isinstance(answer, Exception):
            raise answer
        return bytes(answer)

    monkeypatch.setattr(local.files, "cat_file", fails_once, raising=False)
    found = local.load(Span(0, 0), ["text"])
    assert found is not None
    assert found["text"].to_list() == ["x"]
    monkeypatch.setattr(local.files, "cat_file", lambda _: random.randbytes(99), raising=False)
    with pytest.raises(ArtifactError, match="no two reads were whole"):
        local.load(Span(0, 0), ["text"])
    assert local.num_damaged() == 0


def test_reads_that_all_end_early_at_one_place_set_nothing_aside(
    store: RolloutStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A proxy that cuts every answer, for one reader of a team."""
    store.append(rows([("a", 0)], "x"))
    read = store.files.cat_file
    with monkeypatch.context() as proxied:
        proxied.setattr(store.files, "cat_file", lambda path: read(path)[:-9], raising=False)
        with pytest.raises(ArtifactError, match="no two reads were whole"):
            store.load(Span(0, 0), ["text"])
        ((_, said),) = maintenance.find_damaged(store)
        assert "the network or the disk returns wrong data" in said
    assert store.num_damaged() == 0
    assert owners(store, [("a", 0)]) == {("a", 0): "x"}


def test_another_versions_shard_is_not_taken_for_damage(store: RolloutStore) -> None:
    other = shards.encode(rows([("a", 0)], "x").drop("engine"))
    store.append(rows([("b", 0)], "y"))
    store.publish(other)
    with pytest.raises(ArtifactError, match="another version of Winnow"):
        owners(store, [("a", 0), ("b", 0)])
    assert store.num_damaged() == 0


def test_large_batches_are_split() -> None:
    frame = rows([("a", i) for i in range(64)], "x")
    parts = shards.encode_parts(frame, max_bytes=len(shards.encode(frame)) - 1)
    assert len(parts) == 2
    assert pl.concat([shards.decode(part, list(STORE.columns), "x") for part in parts]).equals(
        frame
    )


def test_writers_at_once_get_different_places_and_lose_nothing(store: RolloutStore) -> None:
    def write(name: int) -> None:
        mine = again(store)
        for i in range(10):
            mine.append(rows([("shared", i), (f"own {name}", i)], f"{name}"))
            if i % 5 == 4:
                compaction.compact(mine)

    threads = [threading.Thread(target=write, args=[name]) for name in range(4)]
    for thread in threads:
        thread.start()
    seen: dict[tuple[str, int], str] = {}
    keys = [("shared", i) for i in range(10)] + [
        (f"own {n}", i) for n in range(4) for i in range(10)
    ]
    while any(thread.is_alive() for thread in threads):  # a reader never sees an owner change
        now = owners(store, keys)
        assert {key: now.get(key) for key in seen} == seen
        seen = now
    for thread in threads:
        thread.join()
    assert len(owners(store, keys)) == 50


@given(st.randoms(use_true_random=False), st.integers(3, 12))
def test_owners_stay_through_compactions_that_overlap_or_were_killed(
    rng: random.Random, num_shards: int
) -> None:
    """Compacted spans of any overlap, and any part of what they cover removed: each key keeps its
    first row."""
    keys = [("p", i) for i in range(6)]
    appended = {
        Span(n, n): rows(rng.sample(keys, rng.randint(1, 4)), f"shard {n}")
        for n in range(num_shards)
    }
    expected = first_rows(appended)
    present, views = dict(appended), [dict(appended)]
    for _ in range(rng.randint(1, 4)):
        view = rng.choice(views)  # what this machine saw, perhaps before the others were at work
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


def first_rows(found: dict[Span, pl.DataFrame]) -> dict[Any, str]:
    owner: dict[Any, str] = {}
    for span in sorted(found):
        for key_and_text in found[span].select(*shards.KEYS, "text").iter_rows():
            owner.setdefault(key_and_text[:2], key_and_text[2])
    return owner


def test_two_compactions_of_different_ranges_may_meet(store: RolloutStore) -> None:
    """Two machines, each of which saw another part of the folder: their shards overlap, and are
    merged again."""
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
    assert compaction.compact(store) == 3
    assert store.spans() == [Span(0, 5)]
    assert [name for name in store.names() if name.endswith(".parquet")] == [Span(0, 5).name]
    assert owners(store, keys) == expected


def test_a_reader_that_listed_before_a_compaction_looks_again(store: RolloutStore) -> None:
    keys = [("a", i) for i in range(4)]
    for n in range(4):
        store.append(rows([("a", n)], f"shard {n}"))
    view = StoreView(store, rows(keys, "").select(shards.KEYS))
    assert len(view.owned()) == 4  # the key columns are read, and remembered
    compaction.compact(again(store))
    assert sorted(view.read(["text"])["text"]) == [f"shard {n}" for n in range(4)]


def test_rows_are_read_once_though_shards_are_compacted_or_damaged_meanwhile(
    store: RolloutStore,
) -> None:
    for n in range(4):
        store.append(rows([("a", n)], f"shard {n}"))
    view = StoreView(store, rows([("a", n) for n in range(4)], "").select(shards.KEYS))
    parts = view.parts(["text"])
    assert next(parts)["text"].to_list() == ["shard 0"]
    damage(store, Span(2, 2))
    assert next(parts)["text"].to_list() == ["shard 1"]
    compaction.compact(again(store))
    assert [part["text"].to_list() for part in parts] == [["shard 3"]]
    assert list(view.parts(["text"])) == []
    store.append(rows([("a", 2), ("a", 1)], "sampled again"))
    [part] = view.parts(["text"])
    assert part.rows() == [("a", 2, "sampled again")]
    assert view.unread.is_empty()


def test_a_writer_that_slept_through_a_compaction_is_not_lost(store: RolloutStore) -> None:
    """It finds place 1 free, because others filled it and compacted it away while it slept."""
    store.append(rows([("a", 0)], "first"))

    class Sleeper(RolloutStore):
        listed = False

        def names(self) -> list[str]:
            found = super().names()
            if not self.listed and "sampling.json" in found and self.description is None:
                self.listed = True
                others = again(store)
                for n in range(1, 4):
                    others.append(rows([("a", n)], f"other {n}"))
                compaction.compact(others)
            return found

    sleeper = Sleeper(store.files, store.folder, {"policy": "p"})
    sleeper.append(rows([("a", 3), ("late", 0)], "sleeper"))
    assert store.spans() == [Span(0, 3), Span(4, 4)]
    assert owners(store, [("a", 3), ("late", 0)]) == {("a", 3): "other 3", ("late", 0): "sleeper"}


@pytest.mark.parametrize("store", [pytest.param("bucket", marks=pytest.mark.s3)], indirect=True)
def test_a_shard_whose_answer_was_lost_is_not_written_again(
    store: RolloutStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.append(rows([("a", 0)], "first"))
    write = store.files.pipe_file

    def lost(path: str, *more: Any, **settings: Any) -> None:
        write(path, *more, **settings)
        raise ConnectionResetError("the answer was lost")

    monkeypatch.setattr(store.files, "pipe_file", lost, raising=False)
    store.append(rows([("b", 0)], "mine"))
    assert store.spans() == [Span(0, 0), Span(1, 1)]


def test_what_a_killed_writer_left_is_removed(local: RolloutStore) -> None:
    local.append(rows([("a", 0)], "first"))
    left = Path(local.folder) / ".0000000001-0000000001.parquet.abc.unfinished"
    left.write_bytes(b"half")
    local.tidy()
    assert not left.exists()
    assert local.spans() == [Span(0, 0)]


def test_a_shard_that_was_compacted_at_once_is_not_written_again(store: RolloutStore) -> None:
    """The compaction comes between the writer's file and its look at the names."""
    store.append(rows([("a", 0)], "first"))

    class Overtaken(RolloutStore):
        def create(self, name: str, content: bytes) -> bool:
            made = super().create(name, content)
            if name == Span(1, 1).name:
                compaction.compact(again(store))
            return made

    Overtaken(store.files, store.folder).append(rows([("b", 0)], "mine"))
    assert store.spans() == [Span(0, 1)]
    assert owners(store, [("a", 0), ("b", 0)]) == {("a", 0): "first", ("b", 0): "mine"}


def test_a_compacted_shard_that_rots_gives_way_to_what_it_covered(store: RolloutStore) -> None:
    for n in range(3):
        store.append(rows([("a", n)], f"shard {n}"))
    parts = [store.load(span, list(STORE.columns)) for span in store.spans()]
    content = bytearray(shards.encode(pl.concat([part for part in parts if part is not None])))
    content[50] ^= 1
    store.create(Span(0, 2).name, bytes(content))
    compaction.remove_covered(store, Span(0, 2))  # it must not trust the rotten one
    assert owners(store, [("a", n) for n in range(3)]) == {("a", n): f"shard {n}" for n in range(3)}


def test_a_damaged_place_is_never_filled_again(store: RolloutStore) -> None:
    store.append(rows([("a", 0)], "x"))
    damage(store, Span(0, 0))
    assert owners(store, [("a", 0)]) == {}
    store.append(rows([("a", 0)], "again"))
    assert store.spans() == [Span(1, 1)]


def test_compaction_makes_few_large_files_and_leaves_large_ones_alone() -> None:
    sizes = {Span(0, 9): 60, **{Span(n, n): 10 for n in range(10, 20)}}
    assert compaction.plan(sizes, max_bytes=64) == [
        [Span(n, n) for n in range(10, 16)],
        [Span(n, n) for n in range(16, 20)],
    ]
    assert compaction.plan({Span(0, 0): 100, Span(1, 1): 100}, max_bytes=64) == []


def test_a_server_that_ignores_conditions_is_refused(local: RolloutStore) -> None:
    class Careless(RolloutStore):
        def create(self, name: str, content: bytes) -> bool:
            Path(self.folder, name).parent.mkdir(parents=True, exist_ok=True)
            Path(self.folder, name).write_bytes(content)
            return True

    careless = Careless(local.files, local.folder, {"policy": "p"})
    careless.append(rows([("a", 0)], "x"))
    with pytest.raises(ArtifactError, match="If-None-Match is ignored"):
        Careless(local.files, local.folder, {"policy": "p"}).append(rows([("a", 1)], "x"))


def test_gc_says_what_it_removes_and_keeps_every_row(store: RolloutStore) -> None:
    keys = [("a", n) for n in range(5)]
    for n in range(5):
        store.append(rows([("a", n)], f"shard {n}"))
    damage(store, Span(4, 4))
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


def test_summary_and_totals_by_hand(store: RolloutStore) -> None:
    store.append(rows([("a", 0), ("a", 1)], "x"))
    store.append(rows([("a", 1), ("b", 0)], "y"))
    summary = maintenance.summarize(store)
    assert (summary.num_prompts, summary.num_rollouts, summary.fewest, summary.most) == (2, 3, 1, 2)
    (total,) = maintenance.totals(store).to_dicts()
    assert (total["engine"], total["rollouts"], total["completion_tokens"]) == ("hf", 4, 8)
    assert maintenance.describe(store) == "temperature 1.0"
    assert list(maintenance.find_damaged(store)) == []
