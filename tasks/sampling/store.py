"""The rollout store: every completion ever sampled for a policy, so that none is sampled twice.

The key of a completion is (policy digest, sampling parameters with the base seed, digest of the rendered prompt,
sample index). The first two are a folder, the others columns, so another policy's rollouts cannot be mixed in. A
store is a set of Parquet shards that are only ever added, whole: writers need no lock, on one machine or many. Where
two wrote the same key, the row of the smallest shard name wins, for every reader alike. What is stored is sampling;
grading is not, so a new verifier grades again and samples nothing.
"""

import hashlib
import io
import logging
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import polars as pl

from tasks.common.artifacts import STORE, Layout
from tasks.common.files import ArtifactError, digest, replace_file
from tasks.common.locations import open_location, reaching
from tasks.sampling.engine import Sampling

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class StoreSettings:
    """The section `store`. `location` null is `store/` under the data root; a folder or `s3://bucket/prefix` else."""

    location: str | None


class RolloutStore:
    """The shards of one policy under one set of sampling parameters."""

    def __init__(self, location: str, policy_digest: str, sampling: Sampling) -> None:
        self.files: Any
        self.location = location
        self.files, root = open_location(location)
        self.folder = f"{root}/{policy_digest}/{digest(asdict(sampling))}"

    def read(self, prompt_digests: Sequence[str]) -> pl.DataFrame:
        """The rows for these prompts, one a (prompt, sample index), in that order."""
        wanted = pl.DataFrame({"prompt_digest": prompt_digests}, schema={"prompt_digest": pl.String}).unique()
        shards = [self.read_shard(path).join(wanted, on="prompt_digest", how="semi") for path in self.shards()]
        rows = pl.concat([STORE.frame([]), *shards])
        keys = ["prompt_digest", "sample_index"]
        return rows.unique(keys, keep="first", maintain_order=True).sort(keys)

    def shards(self) -> list[str]:
        """The shards by name; the first to hold a key owns it."""
        with reaching(self.location):
            if not self.files.exists(self.folder):
                return []
            return sorted(path for path in self.files.ls(self.folder, detail=False) if path.endswith(".parquet"))

    def read_shard(self, path: str) -> pl.DataFrame:
        """One shard, or an empty table with a warning when it is damaged: its rows are then sampled again."""
        with reaching(self.location):  # a server that is away is no damage
            content = self.files.cat_file(path)
        try:
            if hashlib.sha256(content).hexdigest()[:16] != path.removesuffix(".parquet").rsplit("-", 1)[-1]:
                raise ArtifactError("its content is not what its name says")
            return STORE.check(pl.read_parquet(io.BytesIO(content)), path)
        except (pl.exceptions.PolarsError, ArtifactError) as error:
            logger.warning("passing over the damaged shard %s (%s): its rows will be sampled again", path, error)
            with suppress(OSError):  # another reader was faster, or may not write here
                self.files.mv(path, f"{path}.damaged")
            return STORE.frame([])

    def append(self, rows: pl.DataFrame) -> None:
        """Add `rows` as a new shard, whole or not at all."""
        buffer = io.BytesIO()
        STORE.check(rows, self.folder).write_parquet(buffer, compression="zstd")
        content = buffer.getvalue()
        name = f"{time.time_ns():020d}-{uuid.uuid4().hex[:8]}-{hashlib.sha256(content).hexdigest()[:16]}"
        path = f"{self.folder}/{name}.parquet"
        if self.files.protocol in ("file", ("file", "local")):
            replace_file(Path(path), lambda file: file.write(content))
        else:  # an object store shows an object only once it is complete
            with reaching(self.location):
                self.files.pipe_file(path, content)


def open_store(settings: StoreSettings, layout: Layout, policy_digest: str, sampling: Sampling) -> RolloutStore:
    """The store of `policy_digest` under `sampling`."""
    return RolloutStore(settings.location or str(layout.store.absolute()), policy_digest, sampling)


def prompt_digest(token_ids: Sequence[int]) -> str:
    """16 hex digits of a rendered prompt's tokens: template, tokenizer and text all count."""
    return hashlib.sha256(",".join(map(str, token_ids)).encode()).hexdigest()[:16]
