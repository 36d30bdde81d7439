"""Only the owner, or the group of a shared folder, has access to private files."""

import stat
from collections.abc import Callable
from pathlib import Path

import polars as pl
import pytest
import torch

from tasks.common.artifacts import Layout
from tasks.grading.judge import VerdictStore
from tasks.store.folder import open_store
from tasks.store.settings import StoreSettings
from tasks.train.checkpoint.checkpoints import Checkpoints, Snapshot

OPEN = stat.S_IRWXG | stat.S_IRWXO


def store(root: Path) -> Path:
    layout = Layout(root / "data")
    opened = open_store(StoreSettings(None, 8, False), layout, "policy", {"temperature": 1.0})
    opened.create("sampling.json", b"{}")
    return layout.store


def checkpoints(root: Path) -> Path:
    layout = Layout(root / "data")
    kept = Checkpoints(layout.checkpoints, {"recipe": "r", "seed": 0}, keep=1)
    state = {"branch": None}
    table = pl.DataFrame({"step": [0]})
    kept.save(Snapshot(1, {"w": torch.zeros(1)}, {}, state, {"steps": table}, table))
    kept.wait()
    return layout.checkpoints


def verdicts(root: Path) -> Path:
    path = Layout(root / "data").judged
    VerdictStore(path)
    return path


def modes(path: Path) -> dict[str, int]:
    found = [path, *path.rglob("*")] if path.is_dir() else [path]
    return {part.name: stat.S_IMODE(part.stat().st_mode) for part in found}


@pytest.mark.parametrize("made", [store, checkpoints, verdicts])
def test_only_the_owner_has_access(made: Callable[[Path], Path], tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    found = modes(made(tmp_path))
    assert {name: oct(mode) for name, mode in found.items() if mode & OPEN} == {}


@pytest.mark.parametrize("made", [store, checkpoints])
def test_group_of_a_setgid_folder_has_access(made: Callable[[Path], Path], tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data").chmod(0o2770)
    found = modes(made(tmp_path))
    assert set(found.values()) == {0o2770, 0o660}
