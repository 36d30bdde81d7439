"""The GPUs of a stage, and the wait for a GPU of another stage."""

import dataclasses
import logging
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tasks.engines.devices import folder, held, sampling_gpus, training_gpus
from tasks.engines.settings import Cluster
from tests.patience import wait_for
from tests.policies import ENGINE


@pytest.fixture(autouse=True)
def locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use a new folder of locks, and return it."""
    monkeypatch.setenv("WINNOW_LOCKS", str(tmp_path / "locks"))
    return tmp_path / "locks"


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
        ({"name": "auto", "cluster": Cluster("head:6379", 2, 1, 1, "data")}, 2, 0, 0),
        ({"name": "server", "urls": ["http://127.0.0.1:9"]}, 1, 0, 1),
    ],
)
def test_gpus_of_a_stage(
    changes: dict[str, Any],
    num_processes: int,
    sampling: int,
    training: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = dataclasses.replace(ENGINE, **{"device": "cuda", **changes})
    numbers = [f"number-{index}" for index in range(3)]
    gpus = [SimpleNamespace(uuid=number) for number in numbers]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", gpus.__getitem__)
    assert sampling_gpus(settings) == numbers[:sampling]
    assert training_gpus(settings, num_processes) == numbers[:training]


def test_second_stage_waits_for_its_gpu_alone(
    locks: Path, caplog: pytest.LogCaptureFixture
) -> None:
    order: list[str] = []

    def wait() -> None:
        with held(["b"]):
            order.append("b")

    with caplog.at_level(logging.WARNING), ThreadPoolExecutor(1) as pool:
        with held(["b", "a"]):
            second = pool.submit(wait)
            wait_for(lambda: caplog.records or second.done())
            with held(["c"]):
                order.append("c")
        second.result()
    assert order == ["c", "b"]
    first, last = (record.getMessage() for record in caplog.records)
    assert first == f"waiting for the GPU b: process {os.getpid()} holds it ({locks / 'gpu-b'})"
    assert last.startswith("got the GPU b after ")


def test_all_users_of_the_machine_share_the_locks(locks: Path) -> None:
    before = os.umask(0o077)
    try:
        with held(["a"]):
            assert stat.S_IMODE((locks / "gpu-a").stat().st_mode) == 0o666
            assert stat.S_IMODE(folder().stat().st_mode) == 0o1777
    finally:
        os.umask(before)
