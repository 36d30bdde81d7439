"""The store itself: the order of shards, damage, concurrent writers, and totals."""

import io
import random
import threading
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from tasks.common import checksums
from tasks.common.artifacts import STORE
from tasks.common.files import ArtifactError
from tasks.store import compaction, folder, sampling, shards
from tasks.store.admin import maintenance
from tasks.store.folder import RolloutStore
from tasks.store.shards import Span
from tests.store.conftest import damage, owners, reopened, rows


def test_first_shard_of_a_duplicate_key_wins(store: RolloutStore) -> None:
    store.append(rows([("a", 0), ("a", 1)], "first"))
    store.append(rows([("a", 1), ("b", 0)], "second"))
    keys = [("a", 0), ("a", 1), ("b", 0), ("c", 0)]
    assert owners(store, keys) == {("a", 0): "first", ("a", 1): "first", ("b", 0): "second"}
    assert store.names()[:2] == ["0000000000-0000000000.parquet", "0000000001-0000000001.parquet"]


def test_shard_is_plain_parquet_and_any_flipped_bit_is_detected() -> None:
    content = shards.encode(rows([("a", 0)], f"{checksums.KEY} imitated {'0' * 64}"))
    assert shards.decode(content, ["text"], "x")["text"][0].startswith(checksums.KEY)
    for place in range(len(content)):
        damaged = bytearray(content)
        damaged[place] ^= 1
        with pytest.raises(checksums.DamagedError):
            checksums.verify_parquet(io.BytesIO(damaged))
    for length in range(len(content)):
        with pytest.raises(checksums.DamagedError):
            checksums.verify_parquet(io.BytesIO(content[:length]))


def test_shard_with_a_damaged_footer_is_set_aside(
    local: RolloutStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Readers fail in many ways, some without an Exception. `load` verifies after a scan."""
    monkeypatch.setattr(folder, "READ_WAITS", (0.0, None))
    content = shards.encode(rows([("a", 0), ("a", 1)], "x"))
    footer = len(content) - 8 - int.from_bytes(content[-8:-4], "little")
    local.append(rows([("a", 0), ("a", 1)], "x"))
    path, random_ = Path(local.path(Span(0, 0))), random.Random(0)
    for _ in range(400):
        damaged = bytearray(content)
        damaged[random_.randrange(footer, len(content))] ^= 1 << random_.randrange(8)
        path.write_bytes(damaged)
        store = reopened(local)
        store.scan(Span(0, 0))
        if not store.damaged:
            assert store.load(Span(0, 0), ["text"]) is None
        assert [name for name in local.names() if "parquet" in name] == [path.name + ".damaged"]


def test_panic_of_the_reader_leads_to_the_checksum(
    local: RolloutStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    local.append(rows([("a", 0)], "x"))

    def panics(*_: Any, **__: Any) -> pl.DataFrame:
        raise pl.exceptions.PanicException("index out of bounds")

    with monkeypatch.context() as patched:
        patched.setattr(folder, "ParquetFile", panics)
        patched.setattr(pl, "read_parquet", panics)
        with pytest.raises(ArtifactError, match=r"is undamaged, but .*index out of bounds"):
            local.scan(Span(0, 0))
    damage(local, Span(0, 0))
    assert local.scan(Span(0, 0)).is_empty()
    assert local.num_damaged() == 1


@pytest.mark.parametrize("first", [b"", ConnectionResetError()])
def test_failed_read_is_repeated(
    first: bytes | Exception, local: RolloutStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    local.append(rows([("a", 0)], "x"))
    answers = [first, local.files.cat_file(local.path(Span(0, 0)))]

    def read(_: str) -> bytes:
        if isinstance(answer := answers.pop(0), Exception):
            raise answer
        return answer

    monkeypatch.setattr(local.files, "cat_file", read, raising=False)
    found = local.load(Span(0, 0), ["text"])
    assert found is not None
    assert found["text"].to_list() == ["x"]
    assert local.num_damaged() == 0


def test_reads_truncated_for_one_reader_set_no_shard_aside(
    store: RolloutStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A proxy truncates every answer for one reader of a team."""
    store.append(rows([("a", 0)], "x"))
    read = store.files.cat_file
    with monkeypatch.context() as proxied:
        proxied.setattr(store.files, "cat_file", lambda path: read(path)[:-9], raising=False)
        with pytest.raises(ArtifactError, match="no two reads were complete"):
            store.load(Span(0, 0), ["text"])
        (message,) = maintenance.find_faults(store)
        assert "the network or the disk returns wrong data" in message
    assert store.num_damaged() == 0
    assert owners(store, [("a", 0)]) == {("a", 0): "x"}


def test_shard_of_another_version_is_not_damaged(store: RolloutStore) -> None:
    other = shards.encode(rows([("a", 0)], "x").drop("engine"))
    store.append(rows([("b", 0)], "y"))
    store.publish(other)
    with pytest.raises(ArtifactError, match="another version of Winnow"):
        owners(store, [("a", 0), ("b", 0)])
    (fault,) = maintenance.find_faults(store)
    assert fault.startswith(f"{store.path(Span(1, 1))} is undamaged")


def test_large_batches_are_split() -> None:
    frame = rows([("a", i) for i in range(64)], "x")
    parts = shards.encode_parts(frame, max_bytes=len(shards.encode(frame)) - 1)
    assert len(parts) == 2
    assert pl.concat([shards.decode(part, list(STORE.columns), "x") for part in parts]).equals(
        frame
    )


def test_batches_hold_whole_groups_and_count_each_once() -> None:
    counts = []

    class Counted(list[int]):
        def __len__(self) -> int:
            counts.append(1)
            return super().__len__()

    sizes = [9, 2, 2, 5, 1, *[1] * 995]
    found = sampling.batches([(str(n), Counted(range(size))) for n, size in enumerate(sizes)], 4)
    assert [[list.__len__(indices) for _, indices in batch] for batch in found[:5]] == [
        *([9], [2, 2], [5]),
        *([1, 1, 1, 1], [1, 1, 1, 1]),
    ]
    assert sum(map(len, found)) == len(sizes)
    whole = sampling.batches([("a", Counted([n])) for n in range(1000)], 1000)
    assert len(whole) == 1
    assert len(counts) <= 5 * len(sizes)


def test_concurrent_writers_lose_no_rows(store: RolloutStore) -> None:
    def write(name: int) -> None:
        own_store = reopened(store)
        for i in range(10):
            own_store.append(rows([("shared", i), (f"own {name}", i)], f"{name}"))
            if i % 5 == 4:
                compaction.compact(own_store)

    threads = [threading.Thread(target=write, args=[name]) for name in range(4)]
    for thread in threads:
        thread.start()
    before: dict[tuple[str, int], str] = {}
    keys = [("shared", i) for i in range(10)] + [
        (f"own {n}", i) for n in range(4) for i in range(10)
    ]
    while any(thread.is_alive() for thread in threads):  # a reader never sees an owner change
        now = owners(store, keys)
        assert {key: now.get(key) for key in before} == before
        before = now
    for thread in threads:
        thread.join()
    assert len(owners(store, keys)) == 50


@pytest.mark.parametrize("store", [pytest.param("bucket", marks=pytest.mark.s3)], indirect=True)
def test_name_that_was_taken_or_an_answer_that_was_lost_is_no_error(
    store: RolloutStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process compacts the shard between the refusal and the check of the name."""
    assert store.create("taken", b"1")
    with monkeypatch.context() as compacted:
        compacted.setattr(store.files, "exists", lambda path: False)
        assert not store.create("taken", b"2")
    assert store.files.cat_file(f"{store.folder}/taken") == b"1"
    write = store.files.pipe_file

    def lost(path: str, *more: Any, **settings: Any) -> None:
        write(path, *more, **settings)
        raise ConnectionResetError("the answer was lost")

    monkeypatch.setattr(store.files, "pipe_file", lost, raising=False)
    assert not store.create("mine", b"3")


def test_number_of_a_damaged_shard_is_not_reused(store: RolloutStore) -> None:
    store.append(rows([("a", 0)], "x"))
    damage(store, Span(0, 0))
    assert owners(store, [("a", 0)]) == {}
    store.append(rows([("a", 0)], "again"))
    assert store.spans() == [Span(1, 1)]


def test_server_that_ignores_conditions_is_refused(local: RolloutStore) -> None:
    class Careless(RolloutStore):
        def create(self, name: str, content: bytes) -> bool:
            Path(self.folder, name).parent.mkdir(parents=True, exist_ok=True)
            Path(self.folder, name).write_bytes(content)
            return True

    careless = Careless(local.files, local.folder, {"policy": "p"})
    careless.append(rows([("a", 0)], "x"))
    with pytest.raises(ArtifactError, match="If-None-Match is ignored"):
        Careless(local.files, local.folder, {"policy": "p"}).append(rows([("a", 1)], "x"))


def test_summary_and_totals_by_hand(store: RolloutStore) -> None:
    store.append(rows([("a", 0), ("a", 1)], "x"))
    store.append(rows([("a", 1), ("b", 0)], "y"))
    summary = maintenance.summarize(store)
    assert (summary.num_prompts, summary.num_rollouts, summary.fewest, summary.most) == (2, 3, 1, 2)
    (total,) = maintenance.totals(store).to_dicts()
    assert (total["engine"], total["rollouts"], total["completion_tokens"]) == ("hf", 4, 8)
    assert maintenance.describe(store) == "temperature 1.0"
    assert list(maintenance.find_faults(store)) == []
