"""A machine without GPUs."""

import pytest

from tasks.doctor import nvidia


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvidia, "gpus", list)
