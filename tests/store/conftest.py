"""Stores in a folder and in a bucket, with hand-made shards."""

from pathlib import Path

import polars as pl
import pytest

from tasks.common.artifacts import STORE
from tasks.common.files import digest
from tasks.common.locations import open_location
from tasks.store.folder import RolloutStore
from tasks.store.shards import Span
from tasks.store.view import StoreView


def rows(keys: list[tuple[str, int]], text: str) -> pl.DataFrame:
    return STORE.frame(
        [{**STORE.example, "prompt_digest": p, "sample_index": i, "text": text} for p, i in keys]
    )


def reopened(store: RolloutStore) -> RolloutStore:
    """Return the store of the same folder, as another process opens it."""
    return RolloutStore(
        store.files, store.folder, {"policy": "p", "sampling": {"temperature": 1.0}}
    )


def damage(store: RolloutStore, span: Span) -> None:
    path = store.path(span)
    store.files.pipe_file(path, store.files.cat_file(path)[:-1])


def owners(store: RolloutStore, keys: list[tuple[str, int]]) -> dict[tuple[str, int], str]:
    """Return the text of each key, as a new reader finds it."""
    wanted = rows(keys, "").select("prompt_digest", "sample_index").unique(maintain_order=True)
    found = StoreView(store, wanted).read(["text"])
    assert not found.select("prompt_digest", "sample_index").is_duplicated().any()
    return {(p, i): text for p, i, text in found.iter_rows()}


@pytest.fixture(params=["folder", pytest.param("bucket", marks=pytest.mark.s3)])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> RolloutStore:
    root = str(tmp_path) if request.param == "folder" else request.getfixturevalue("bucket")
    files, path = open_location(root)
    return reopened(RolloutStore(files, f"{path}/policy/{digest({'temperature': 1.0})}"))


@pytest.fixture
def local(tmp_path: Path) -> RolloutStore:
    files, path = open_location(str(tmp_path))
    return reopened(RolloutStore(files, f"{path}/policy/{digest({'temperature': 1.0})}"))
