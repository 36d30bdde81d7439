"""A machine without GPUs, whose CPU multiplies matrices at 10 GFLOP/s."""

import pytest

from flows.doctor import nvidia, rates


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvidia, "gpus", list)
    monkeypatch.setattr(rates, "probe", lambda threads, dtype: 1e10)
