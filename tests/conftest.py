"""Shared fixtures: small policies of real architectures, made here, and what a machine may lack."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")

import importlib.util
from pathlib import Path

import pytest
import torch

from tests.policies import make_guesser, make_policy


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip, saying why, what needs a component this machine lacks; in CI a component it installs may not be lacking."""
    lacking = {
        "vllm": None if importlib.util.find_spec("vllm") else "vLLM is not installed (make test VLLM=cpu)",
        "gpu": None if torch.cuda.is_available() else "no NVIDIA GPU",
        "real_data": None if os.environ.get("WINNOW_REAL_DATA") else "WINNOW_REAL_DATA is not set",
    }
    if os.environ.get("CI") and lacking["vllm"]:
        raise pytest.UsageError("CI installs vLLM, and it is not there: its tests may not be skipped")
    for item in items:
        for name, reason in lacking.items():
            if reason and item.get_closest_marker(name):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def real_data() -> Path:
    """The folder of real data files."""
    return Path(os.environ["WINNOW_REAL_DATA"])


@pytest.fixture(scope="session")
def qwen(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Qwen3 (tied embeddings, character tokenizer) with random weights that are far from uniform."""
    return make_policy(tmp_path_factory.mktemp("qwen"), "qwen3")


@pytest.fixture(scope="session")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Llama (grouped-query attention, untied head, BPE tokenizer with a start token)."""
    return make_policy(tmp_path_factory.mktemp("llama"), "llama")


@pytest.fixture(scope="session")
def guesser(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small Qwen3 that answers sums with a random digit, right about one time in three."""
    return make_guesser(tmp_path_factory.mktemp("guesser"))
