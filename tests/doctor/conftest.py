"""A machine without GPUs."""

import pytest

from tasks.common import nvidia


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvidia, "gpus", list)
