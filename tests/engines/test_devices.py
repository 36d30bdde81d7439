"""The GPUs of a stage, and the wait for a GPU of another stage."""

import dataclasses
import logging
import multiprocessing
import os
import stat
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tasks.engines.devices import folder, held, sampling_gpus, training_gpus
from tests.policies import ENGINE

FORK = multiprocessing.get_context("fork")


@pytest.fixture(autouse=True)
def locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use a new folder of locks, and return it."""
    monkeypatch.setenv("WINNOW_LOCKS", str(tmp_path / "locks"))
    return tmp_path / "locks"


@pytest.fixture
def three_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a machine with three GPUs."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    numbered = [SimpleNamespace(uuid=f"number-{index}") for index in range(3)]
    monkeypatch.setattr(torch.cuda, "get_device_properties", numbered.__getitem__)


@pytest.mark.parametrize(
    ("changes", "num_processes", "sampling", "training"),
    [
        ({"device": "cpu"}, 2, 0, 0),
        ({"name": "hf"}, 1, 1, 1),
        ({"name": "vllm"}, 2, 1, 2),
        ({"name": "hf"}, 5, 1, 3),  # the ranks raise the error
        ({"name": "auto", "num_replicas": 3}, 1, 3, 3),
        ({"name": "server", "num_replicas": 1}, 2, 1, 3),
        ({"name": "server", "num_replicas": 2}, 2, 2, 2),
        ({"name": "server", "vllm": {"tensor_parallel_size": 2}}, 1, 2, 3),
        ({"name": "server", "vllm": {"tensor_parallel_size": 2}}, 2, 2, 2),
        ({"name": "server", "urls": ["http://127.0.0.1:9"]}, 1, 0, 1),
    ],
)
def test_gpus_of_a_stage(
    changes: dict[str, Any], num_processes: int, sampling: int, training: int, three_gpus: None
) -> None:
    settings = dataclasses.replace(ENGINE, **{"device": "cuda", **changes})
    numbers = [f"number-{index}" for index in range(3)]
    assert sampling_gpus(settings) == numbers[:sampling]
    assert training_gpus(settings, num_processes) == numbers[:training]


def test_second_stage_waits_until_the_first_is_killed(
    locks: Path, caplog: pytest.LogCaptureFixture
) -> None:
    ready = FORK.Event()
    order: list[str] = []

    def hold() -> None:
        with held(["b", "a"]):
            ready.set()
            time.sleep(60)

    first = FORK.Process(target=hold)
    first.start()
    assert ready.wait(10)
    with held(["c"]):  # another GPU is free
        order.append("c")

    def wait() -> None:
        with held(["b"]):
            order.append("b")

    second = threading.Thread(target=wait)
    with caplog.at_level(logging.WARNING):
        second.start()
        while not caplog.records:
            time.sleep(0.01)
        assert order == ["c"]
        first.kill()
        second.join(10)
    first.join()
    assert order == ["c", "b"]
    messages = [record.getMessage() for record in caplog.records]
    assert messages[0] == f"waiting for the GPU b: process {first.pid} holds it ({locks / 'gpu-b'})"
    assert messages[1].startswith("got the GPU b after ")


def test_all_users_of_the_machine_share_the_locks(locks: Path) -> None:
    before = os.umask(0o077)
    try:
        with held(["a"]):
            assert stat.S_IMODE((locks / "gpu-a").stat().st_mode) == 0o666
            assert stat.S_IMODE(folder().stat().st_mode) == 0o1777
    finally:
        os.umask(before)
