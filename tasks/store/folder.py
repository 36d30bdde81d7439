"""The rollout store: every completion ever sampled for a policy, so that none is sampled twice.

The key of a completion is (policy digest, sampling parameters with the base seed, digest of the
rendered prompt, sample index). The first two name a folder, and the last two are columns, so
rollouts of different policies are never mixed. Completions are stored without grades, so a new
verifier can grade them without sampling.

A folder is a sequence of numbered Parquet shards that grows only at its end. A writer appends by
creating the file of the next number, whole, and only if that file does not exist. If several
writers, on one machine or many, try the same number, one succeeds, and the other writers use the
next. So no lock is needed, and no shard ever appears before a shard already read. If two shards
contain the same key, the row in the shard with the smallest name wins, for every reader."""

import hashlib
import json
import logging
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import polars as pl
from pyarrow.parquet import ParquetFile

from tasks.common.artifacts import STORE, Layout
from tasks.common.checksums import DamagedError
from tasks.common.files import (
    ArtifactError,
    create_file,
    digest,
    make_private_folder,
    remove_unfinished,
    require_writable,
)
from tasks.common.locations import UNREACHED, open_location, reaching
from tasks.store import shards
from tasks.store.settings import StoreSettings
from tasks.store.shards import KEYS, Span

logger = logging.getLogger(__name__)
T = TypeVar("T")

DESCRIPTION = "sampling.json"  # the file that describes a folder
MAX_TRIES = 100  # of a read or an append that other processes interfere with
READ_WAITS = (0.0, 0.1, 0.5, None)  # seconds to wait after each failed read


class RolloutStore:
    """The shards of one policy under one set of sampling parameters."""

    def __init__(
        self,
        files: Any,
        folder: str,
        description: dict[str, Any] | None = None,
        private: Path | None = None,
    ) -> None:
        self.files = files
        self.folder = folder
        self.description = description
        self.private = private  # the store's root, if only this data root uses it
        self.damaged: set[Span] = set()  # skipped, even if renaming them failed

    @property
    def location(self) -> str:
        """The folder as users would write it: a local path, or an `s3://` address."""
        return self.folder if is_local(self.files) else f"s3://{self.folder}"

    # ----------------------------------------------------------------------------------------------
    # listing

    def names(self) -> list[str]:
        """Return the current names of all files."""
        try:
            return sorted(
                path.rsplit("/", 1)[-1] for path in self.files.ls(self.folder, detail=False)
            )
        except FileNotFoundError:
            return []

    def spans(self) -> list[Span]:
        """Return the shards to read, in order. The first shard with a key owns it."""
        found = [
            parsed[0] for name in self.names() if (parsed := shards.parse(name)) and not parsed[1]
        ]
        return shards.live(set(found) - self.damaged)

    def path(self, span: Span) -> str:
        """Return the path of a shard."""
        return f"{self.folder}/{span.name}"

    def num_damaged(self) -> int:
        """Return the number of shards that were set aside as damaged."""
        return sum(name.endswith(".damaged") for name in self.names())

    # ----------------------------------------------------------------------------------------------
    # reading

    def scan(self, span: Span, columns: Sequence[str] = KEYS) -> pl.DataFrame:
        """Return some columns of a shard by ranged reads, without verifying its checksum. Use it to
        find keys, not to read values.

        If the scan fails, the whole shard is read and verified: a damaged footer or a truncated
        read raises many kinds of errors. A damaged shard yields no rows. Raise FileNotFoundError if
        the shard was compacted meanwhile."""
        try:
            with self.files.open(self.path(span), "rb", cache_type="none") as file:
                table = ParquetFile(file).read(columns=list(columns))
                return pl.DataFrame(table).select(columns)
        except FileNotFoundError:
            raise
        except shards.UNREADABLE as error:
            logger.debug("%s: %s", self.path(span), error)
            rows = self.load(span, columns)
            return STORE.frame([]).select(columns) if rows is None else rows

    def load(self, span: Span, columns: Sequence[str]) -> pl.DataFrame | None:
        """Return columns of a shard after verifying its checksum. Rename a damaged shard with a
        warning, and return None: its rows count as missing from now on."""
        try:
            return self.read(span, columns)
        except DamagedError as error:
            path = self.path(span)
            logger.warning(
                "setting aside the damaged shard %s (%s): its rows will be sampled again",
                path,
                error,
            )
            self.damaged.add(span)
            with suppress(OSError):  # another reader was first, or this process may not write here
                self.files.mv(path, f"{path}.damaged")
            return None

    def read(self, span: Span, columns: Sequence[str]) -> pl.DataFrame:
        """Return columns of a shard after verifying its checksum. Raise DamagedError if two reads
        of the full length return the same wrong bytes. Shorter reads do not count, because a proxy
        may cut all of them at the same point. Raise ArtifactError after len(READ_WAITS) reads."""
        path = self.path(span)
        seen: set[bytes] = set()
        for wait in READ_WAITS:
            try:
                content = self.files.cat_file(path)
                return shards.decode(content, columns, path)
            except DamagedError:
                wrong = hashlib.sha256(content).digest()
                if wrong in seen and len(content) == self.files.size(path):
                    raise
                seen.add(wrong)
            except (FileNotFoundError, PermissionError):
                raise
            except UNREACHED:
                if wait is None:
                    raise
            if wait is not None:
                time.sleep(wait)
        raise ArtifactError(
            f"{path} was read {len(READ_WAITS)} times, but no two reads were complete and equal: "
            "the network or the disk returns wrong data. Repair that, and run the same command "
            "again"
        )

    def retry(self, read: Callable[[], T]) -> T:
        """Return `read()`. If a listed shard is gone, because a compaction has merged it into
        another, call `read` again, up to MAX_TRIES times."""
        with reaching(self.location):
            for _ in range(MAX_TRIES):
                with suppress(FileNotFoundError):
                    return read()
            return read()

    # ----------------------------------------------------------------------------------------------
    # writing

    def require_writable(self) -> None:
        """Raise ArtifactError if this folder is not writable. A local folder is tested by writing a
        temporary file, a bucket by writing the description."""
        if is_local(self.files):
            require_writable(Path(self.folder))
            return
        with reaching(self.location):
            self.write_description()

    def tidy(self) -> None:
        """Remove unfinished files of killed writers. In a bucket there are none."""
        if is_local(self.files):
            remove_unfinished(Path(self.folder))

    def append(self, rows: pl.DataFrame) -> None:
        """Append `rows`. Each shard is written whole or not at all."""
        parts = shards.encode_parts(STORE.check(rows, self.folder))
        with reaching(self.location):
            self.write_description()
            for content in parts:
                self.publish(content)

    def publish(self, content: bytes) -> None:
        """Create the shard of the next free sequence number.

        A slow writer may find its number free only because other writers used it for a shard that
        was then compacted away. No reader uses a shard inside a compacted span, so the writer then
        tries the next number. It also does so if the response to a creation was lost, or if its
        shard was compacted at once: then its rows are stored twice, which changes no result."""
        for _ in range(MAX_TRIES):
            # the number after the last one, damaged shards included
            taken = [parsed[0] for name in self.names() if (parsed := shards.parse(name))]
            span = Span(*[max((span.last for span in taken), default=-1) + 1] * 2)
            if self.create(span.name, content):
                # the shard is valid unless a compaction has covered its number meanwhile
                if not any(other != span and other.covers(span) for other in self.spans()):
                    return
                self.remove(span.name)
            # another writer was first
            time.sleep(random.uniform(0.0, 0.05))
        raise ArtifactError(
            f"{self.folder}: no free shard name in {MAX_TRIES} tries: check that nothing else "
            "writes there"
        )

    def create(self, name: str, content: bytes) -> bool:
        """Write a file, whole or not at all, unless the name exists. Return whether it was
        written."""
        path = f"{self.folder}/{name}"
        if is_local(self.files):
            if self.private:
                make_private_folder(self.private)
            return create_file(Path(path), lambda file: file.write(content))
        try:
            self.files.pipe_file(path, content, mode="create")
        except OSError as error:
            # servers report an existing file in many ways; a compaction may have removed it since
            response = getattr(error.__cause__, "response", {})
            is_taken = response.get("Error", {}).get("Code") == "PreconditionFailed"
            if not (is_taken or self.files.exists(path)):
                raise
            return False
        return True

    def remove(self, name: str) -> None:
        """Remove a file, if it exists."""
        with suppress(FileNotFoundError):
            self.files.rm_file(f"{self.folder}/{name}")

    def write_description(self) -> None:
        """Write the small file that describes this folder. Raise ArtifactError if the server
        allows overwriting it, because shards could be overwritten as well."""
        if self.description is None:
            return
        content = (json.dumps(self.description, indent=2, sort_keys=True) + "\n").encode()
        existed = DESCRIPTION in self.names()
        if self.create(DESCRIPTION, content) and existed:
            raise ArtifactError(
                f"{self.folder} overwrites files that it must only create (If-None-Match is "
                "ignored), so two writers would destroy each other's rollouts: use a server "
                "that supports conditional writes"
            )
        self.description = None  # once per process


def is_local(files: Any) -> bool:
    """Return whether `files` is the local file system."""
    return files.protocol in ("file", ("file", "local"))


def location(settings: StoreSettings, layout: Layout) -> str:
    """Return the root of the store: `store.location`, or `store/` under the data root."""
    return settings.location or str(layout.store.absolute())


def open_store(
    settings: StoreSettings, layout: Layout, policy_digest: str, sampling: Mapping[str, Any]
) -> RolloutStore:
    """Return the store of a policy. `sampling` contains the sampling parameters and base seed."""
    files, root = open_location(location(settings, layout))
    description = {"policy": policy_digest, "sampling": dict(sampling)}
    folder = f"{root}/{policy_digest}/{digest(dict(sampling))}"
    private = None if settings.location else layout.store
    return RolloutStore(files, folder, description, private)


def prompt_digest(token_ids: Sequence[int]) -> str:
    """Return 16 hex digits: the digest of a rendered prompt's tokens, which depend on template,
    tokenizer and text."""
    return hashlib.sha256(",".join(map(str, token_ids)).encode()).hexdigest()[:16]
