"""Data roots with and without a record."""

from pathlib import Path

import pytest

from tasks.common import tracking
from tasks.common.artifacts import Layout
from tests.stages import give_record


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Layout:
    monkeypatch.delenv(tracking.PIPELINE_VARIABLE, raising=False)
    return Layout(tmp_path / "data")


@pytest.fixture
def layout(bare: Layout) -> Layout:
    give_record(bare.root)
    return bare
