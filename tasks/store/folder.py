"""The rollout store: every completion ever sampled for a policy, so that none is sampled twice.

The key of a completion is (policy digest, sampling parameters with the base seed, digest of the
rendered prompt, sample index). The first two are a folder, the others columns, so another policy's
rollouts cannot be mixed in. What is stored is sampling; grading is not, so a new verifier grades
again and samples nothing.

A folder is a sequence of Parquet shards that is only ever added to, at its end. To append is to
create the file of the next place, whole, where no such file is: of several writers, on one machine
or many, one gets the place and the others take the next. So no lock is needed, and nothing ever
appears before what a reader has seen: where two wrote the same key, the row of the smallest shard
name wins, now and for ever, for every reader alike."""

import hashlib
import json
import logging
import random
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import polars as pl

from tasks.common.artifacts import STORE, Layout
from tasks.common.files import ArtifactError, create_file, digest
from tasks.common.locations import open_location, reaching
from tasks.store import shards
from tasks.store.shards import KEYS, DamagedError, Span

logger = logging.getLogger(__name__)
T = TypeVar("T")

DESCRIPTION = "sampling.json"
MAX_TRIES = 100
SCANS_AT_ONCE, SHARDS_A_JOIN = 8, 64
NUMBERED = ["prompt", "sample_index"]


@dataclass(frozen=True)
class StoreSettings:
    """The section `store`. `location` null is `store/` under the data root; a folder or
    `s3://bucket/prefix` else."""

    location: str | None
    batch_rollouts: int
    logprobs: bool


class RolloutStore:
    """The shards of one policy under one set of sampling parameters."""

    def __init__(self, files: Any, folder: str, description: dict[str, Any] | None = None) -> None:
        self.files, self.folder, self.description = files, folder, description
        self.passed_over: set[Span] = set()  # damaged, should they not let themselves be renamed

    @property
    def location(self) -> str:
        """The folder as a user writes it."""
        return self.folder if is_local(self.files) else f"s3://{self.folder}"

    # ----------------------------------------------------------------------------------------------
    # what is there

    def names(self) -> list[str]:
        """The names of all files, as they are now."""
        try:
            return sorted(
                path.rsplit("/", 1)[-1] for path in self.files.ls(self.folder, detail=False)
            )
        except FileNotFoundError:
            return []

    def spans(self) -> list[Span]:
        """The shards to read, in order; the first to hold a key owns it."""
        found = [
            parsed[0] for name in self.names() if (parsed := shards.parse(name)) and not parsed[1]
        ]
        return shards.live(set(found) - self.passed_over)

    def path(self, span: Span) -> str:
        return f"{self.folder}/{span.name}"

    def num_damaged(self) -> int:
        return sum(name.endswith(".damaged") for name in self.names())

    # ----------------------------------------------------------------------------------------------
    # reading

    def scan(self, span: Span, columns: Sequence[str] = KEYS) -> pl.DataFrame:
        """Some columns of a shard by ranged reads, without its checksum: good for looking, not for
        values.

        What does not even read is examined, and set aside when it is damaged. FileNotFoundError:
        compacted meanwhile."""
        try:
            with self.files.open(self.path(span), "rb", cache_type="none") as file:
                return pl.read_parquet(file, columns=list(columns), use_pyarrow=True)
        except FileNotFoundError:
            raise
        except (pl.exceptions.PolarsError, ValueError, OSError):
            if (
                self.load(span, columns) is not None
            ):  # whole, and still unreadable: not for us to hide
                raise
            return STORE.frame([]).select(columns)

    def load(self, span: Span, columns: Sequence[str]) -> pl.DataFrame | None:
        """Columns of a whole shard whose checksum is right; None, with a warning, when it is
        damaged and set aside."""
        path = self.path(span)
        for attempt in (1, 2):  # a second look: the reading may have been at fault
            content = self.files.cat_file(path)
            try:
                return shards.decode(content, columns, path)
            except (DamagedError, pl.exceptions.PolarsError) as error:
                if attempt == 2:
                    self.set_aside(span, error)
        return None

    def set_aside(self, span: Span, why: Exception) -> None:
        """Rename a damaged shard; what it held counts as missing from now on."""
        path = self.path(span)
        logger.warning(
            "setting aside the damaged shard %s (%s): its rows will be sampled again", path, why
        )
        self.passed_over.add(span)
        with suppress(OSError):  # another reader was faster, or may not write here
            self.files.mv(path, f"{path}.damaged")

    def persist(self, look: Callable[[], T]) -> T:
        """Look again when a shard is gone that was there a moment ago: a compaction has put it into
        another."""
        with reaching(self.location):
            for _ in range(MAX_TRIES):
                with suppress(FileNotFoundError):
                    return look()
            return look()

    # ----------------------------------------------------------------------------------------------
    # writing

    def append(self, rows: pl.DataFrame) -> None:
        """Add `rows` at the end, whole or not at all."""
        parts = shards.encode_parts(STORE.check(rows, self.folder))
        with reaching(self.location):
            self.describe()
            for content in parts:
                self.publish(content)

    def publish(self, content: bytes) -> Span:
        """Create the shard of the next free place.

        A writer that slept may find its place free only because others filled it and compacted it
        away: whoever stands in a compacted span would not be read, and moves on."""
        for _ in range(MAX_TRIES):
            taken = [parsed[0] for name in self.names() if (parsed := shards.parse(name))]
            span = Span(*[max((span.last for span in taken), default=-1) + 1] * 2)
            if self.create(span.name, content):
                others = [
                    p[0] for name in self.names() if name != span.name and (p := shards.parse(name))
                ]
                if not any(other.covers(span) for other in others):
                    return span
                self.remove(span.name)
            time.sleep(random.uniform(0.0, 0.05))
        raise ArtifactError(
            f"{self.folder}: no free place in {MAX_TRIES} tries; is something else writing there?"
        )

    def create(self, name: str, content: bytes) -> bool:
        """Write a file, whole or not at all, where there is none of that name; False when there
        is."""
        path = f"{self.folder}/{name}"
        if is_local(self.files):
            return create_file(Path(path), lambda file: file.write(content))
        try:
            self.files.pipe_file(path, content, mode="create")
        except OSError:
            if not self.files.exists(path):  # servers word a refusal in many ways
                raise
            return False
        return True

    def remove(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self.files.rm_file(f"{self.folder}/{name}")

    def describe(self) -> None:
        """Say in a small file what this folder is; writing it again must be refused, or no shard
        would be safe."""
        if self.description is None:
            return
        content = (json.dumps(self.description, indent=2, sort_keys=True) + "\n").encode()
        existed = DESCRIPTION in self.names()
        if self.create(DESCRIPTION, content) and existed:
            raise ArtifactError(
                f"{self.folder} lets a file be written over that was to be created only "
                "(If-None-Match is ignored): "
                "two writers would destroy each other's rollouts. Use a server that knows "
                "conditional writes"
            )
        self.description = None  # once a process


class Holdings:
    """What a store holds of the keys that a stage wants (prompt_digest, sample_index: one row
    each).

    Finding them reads the key columns alone, each shard once, and keeps 12 bytes for each: prompts
    are numbered. Values are read from whole, verified shards."""

    def __init__(self, store: RolloutStore, wanted: pl.DataFrame) -> None:
        self.store, self.wanted = store, wanted
        self.numbers = (
            wanted.select("prompt_digest").unique(maintain_order=True).with_row_index("prompt")
        )
        self.spans: list[
            Span
        ] = []  # looked at, in the order of looking; `shard` is the place in it
        self.found = pl.DataFrame(
            schema={"prompt": pl.UInt32, "sample_index": pl.Int32, "shard": pl.UInt32}
        )

    def owned(self) -> pl.DataFrame:
        """Every sample there is of the wanted prompts (prompt, sample_index), and the shard that
        owns it."""
        return self.store.persist(self.refresh)

    def refresh(self) -> pl.DataFrame:
        spans = self.store.spans()
        known = set(self.spans)
        new = [span for span in spans if span not in known]
        with ThreadPoolExecutor(SCANS_AT_ONCE) as pool:
            for first in range(0, len(new), SHARDS_A_JOIN):
                some = new[first : first + SHARDS_A_JOIN]
                self.note(some, list(pool.map(self.store.scan, some)))
        place = {span: number for number, span in enumerate(spans)}
        ranks = pl.DataFrame(
            {"shard": range(len(self.spans)), "rank": [place.get(span) for span in self.spans]},
            schema={"shard": pl.UInt32, "rank": pl.UInt32},
        ).drop_nulls()  # gone, or covered by now
        rows = self.found.join(ranks, on="shard", how="inner")
        return rows.sort("rank", maintain_order=True).unique(
            NUMBERED, keep="first", maintain_order=True
        )

    def note(self, spans: Sequence[Span], keys: Sequence[pl.DataFrame]) -> None:
        """Remember which of the wanted prompts' samples are in these shards."""
        shards_of = [
            part.with_columns(shard=pl.lit(number, dtype=pl.UInt32))
            for number, part in enumerate(keys, start=len(self.spans))
        ]
        rows = pl.concat(shards_of).join(
            self.numbers, on="prompt_digest", how="inner", maintain_order="left"
        )
        self.found = pl.concat([self.found, rows.select(self.found.columns)])
        self.spans += spans

    def numbered(self, keys: pl.DataFrame) -> pl.DataFrame:
        return keys.join(self.numbers, on="prompt_digest", how="left", maintain_order="left")

    def lacking(self, keys: pl.DataFrame) -> pl.DataFrame:
        """Those of `keys` that the store has not."""
        missing = self.numbered(keys).join(
            self.owned(), on=NUMBERED, how="anti", maintain_order="left"
        )
        return missing.select(KEYS)

    def prompts(self) -> pl.DataFrame:
        """The wanted prompts (prompt_digest) of which the store has a sample, wanted or not."""
        return self.numbers.join(self.owned(), on="prompt", how="semi").select("prompt_digest")

    def read(self, columns: Sequence[str]) -> pl.DataFrame:
        """The wanted rows that are there and whole: the keys and `columns`."""
        return self.store.persist(lambda: self.load([*KEYS, *columns]))

    def load(self, columns: Sequence[str]) -> pl.DataFrame:
        owned = self.owned().join(self.numbered(self.wanted), on=NUMBERED, how="inner")
        rows = [STORE.frame([]).select(columns)]
        for keys in owned.partition_by("shard", maintain_order=True):
            found = self.store.load(self.spans[keys["shard"][0]], columns)
            if found is not None:
                rows.append(found.unique(KEYS, keep="first").join(keys, on=KEYS, how="semi"))
        return pl.concat(rows)


def is_local(files: Any) -> bool:
    return files.protocol in ("file", ("file", "local"))


def location(settings: StoreSettings, layout: Layout) -> str:
    """The root of all that is stored: `store/` under the data root unless `store.location` says
    another."""
    return settings.location or str(layout.store.absolute())


def open_store(
    settings: StoreSettings, layout: Layout, policy_digest: str, sampling: Mapping[str, Any]
) -> RolloutStore:
    """The store of `policy_digest` under the sampling parameters and base seed `sampling`."""
    files, root = open_location(location(settings, layout))
    description = {"policy": policy_digest, "sampling": dict(sampling)}
    return RolloutStore(files, f"{root}/{policy_digest}/{digest(dict(sampling))}", description)


def prompt_digest(token_ids: Sequence[int]) -> str:
    """16 hex digits of a rendered prompt's tokens: template, tokenizer and text all count."""
    return hashlib.sha256(",".join(map(str, token_ids)).encode()).hexdigest()[:16]
