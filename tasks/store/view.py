"""A view of the store, restricted to the rollouts that a stage requests: the stored keys, and their
values, shard by shard.

A damaged shard is set aside, and its keys count as missing from then on. The rows of a shard that a
compaction has merged meanwhile are found again."""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import polars as pl

from tasks.common.artifacts import STORE
from tasks.common.files import ArtifactError
from tasks.common.locations import reaching
from tasks.store.folder import MAX_TRIES, RolloutStore
from tasks.store.shards import KEYS, Span

MAX_SCANS = 8  # shards scanned at the same time
SHARDS_PER_JOIN = 64  # scanned shards to match in one join of keys
NUMBERED_KEYS = ["prompt", "sample_index"]  # KEYS with a number in place of the prompt's digest


class StoreView:
    """A view of a store, restricted to the keys that a stage requests (prompt_digest, sample_index;
    one row each).

    Keys are found by reading only the key columns, once per shard. Each key uses 20 bytes of
    memory, because prompts are numbered. Values are read from verified shards."""

    def __init__(self, store: RolloutStore, keys: pl.DataFrame) -> None:
        self.store = store
        self.keys = keys
        distinct = keys.select("prompt_digest").unique(maintain_order=True)
        self.numbers = distinct.with_row_index("prompt")
        # shards scanned so far; the column `shard` of `present` is an index into them
        self.spans: list[Span] = []
        self.present = pl.DataFrame(
            schema={"prompt": pl.UInt32, "sample_index": pl.Int32, "shard": pl.UInt32}
        )
        self.unread = self.numbered(keys).select(NUMBERED_KEYS)  # not yet yielded by `parts`

    def owned(self, among: pl.DataFrame | None = None) -> pl.DataFrame:
        """Return the stored samples of the requested prompts, limited to the keys `among`, as
        (prompt, sample_index, shard): `shard` is the index in `spans` of the shard that owns it."""
        spans = self.store.retry(self.scan_new_shards)
        found = self.present
        if among is not None:
            found = found.join(among, on=NUMBERED_KEYS, how="semi", maintain_order="left")
        # rank the shards by their current order; removed or covered shards have no rank
        order = {span: rank for rank, span in enumerate(spans)}
        ranks = pl.DataFrame(
            {"shard": range(len(self.spans)), "rank": [order.get(span) for span in self.spans]},
            schema={"shard": pl.UInt32, "rank": pl.UInt32},
        ).drop_nulls()
        rows = found.join(ranks, on="shard", how="inner").sort("rank", maintain_order=True)
        return rows.unique(NUMBERED_KEYS, keep="first", maintain_order=True)

    def scan_new_shards(self) -> list[Span]:
        """Scan the shards that were written since the last call, and return all shards."""
        spans = self.store.spans()
        known = set(self.spans)
        new = [span for span in spans if span not in known]
        with ThreadPoolExecutor(MAX_SCANS) as pool:
            for first in range(0, len(new), SHARDS_PER_JOIN):
                some = new[first : first + SHARDS_PER_JOIN]
                self.add_keys(some, list(pool.map(self.store.scan, some)))
        return spans

    def add_keys(self, spans: Sequence[Span], keys: Sequence[pl.DataFrame]) -> None:
        """Record which samples of the requested prompts these shards contain."""
        shards_of = [
            part.with_columns(shard=pl.lit(number, dtype=pl.UInt32))
            for number, part in enumerate(keys, start=len(self.spans))
        ]
        rows = pl.concat(shards_of).join(
            self.numbers, on="prompt_digest", how="inner", maintain_order="left"
        )
        self.present = pl.concat([self.present, rows.select(self.present.columns)])
        self.spans += spans

    def numbered(self, keys: pl.DataFrame) -> pl.DataFrame:
        """Return `keys` with the column `prompt`, the number of each prompt."""
        return keys.join(self.numbers, on="prompt_digest", how="left", maintain_order="left")

    def missing(self, keys: pl.DataFrame) -> pl.DataFrame:
        """Return the `keys` that are not in the store."""
        rows = self.numbered(keys)
        stored = self.owned(among=rows)
        return rows.join(stored, on=NUMBERED_KEYS, how="anti", maintain_order="left").select(KEYS)

    def prompts(self) -> pl.DataFrame:
        """Return the requested prompts (prompt_digest) with any sample in the store."""
        return self.numbers.join(self.owned(), on="prompt", how="semi").select("prompt_digest")

    def parts(self, columns: Sequence[str]) -> Iterator[pl.DataFrame]:
        """Yield the keys and `columns` of the requested rows that have not been read yet, one shard
        at a time. Each key is yielded once, and damaged shards are skipped.

        Rows of damaged shards can be sampled again. Then call `parts` again."""
        for _ in range(MAX_TRIES):
            owned = self.owned(among=self.unread)
            if owned.is_empty():
                return
            read = [owned.clear()]
            try:
                for keys in owned.partition_by("shard", maintain_order=True):
                    rows = self.load(keys, [*KEYS, *columns])
                    if rows is not None:
                        read.append(keys)
                        yield rows
            finally:
                self.unread = self.unread.join(pl.concat(read), on=NUMBERED_KEYS, how="anti")
        raise ArtifactError(
            f"{self.store.location}: shards disappeared while they were read, {MAX_TRIES} times: "
            "check that nothing else removes files there"
        )

    def read(self, columns: Sequence[str]) -> pl.DataFrame:
        """Return all rows of `parts` in one table."""
        return pl.concat([STORE.frame([]).select([*KEYS, *columns]), *self.parts(columns)])

    def load(self, keys: pl.DataFrame, columns: Sequence[str]) -> pl.DataFrame | None:
        """Return the rows of `keys`, which are all in one shard. Return None if that shard is
        damaged, or was compacted meanwhile."""
        with reaching(self.store.location):
            try:
                found = self.store.load(self.spans[keys["shard"][0]], columns)
            except FileNotFoundError:
                return None
        if found is None:
            return None
        digests = self.numbers["prompt_digest"][keys["prompt"]]
        rows = found.unique(KEYS, keep="first", maintain_order=True)
        return rows.join(keys.with_columns(digests), on=KEYS, how="semi").select(columns)
