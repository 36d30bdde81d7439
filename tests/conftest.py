"""Shared fixtures, and the skips and the order of the tests."""

import os

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")

import importlib.util
import subprocess
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path

import hypothesis
import pytest
import torch
from s3fs import S3FileSystem

from flows.pipeline import commands
from tasks.common.files import temporary_folder
from tasks.common.locations import open_location
from tasks.common.processes import forks
from tasks.engines.hf.cache import Prefill
from tasks.engines.hf.decoding import Slots
from tasks.grading.programs import sandbox
from tasks.grading.programs.command import Sandbox
from tests import once, s3_server
from tests.patience import wait_for
from tests.policies import make_guesser, make_policy
from tests.report import browser

# a deadline per example would fail on a busy machine
hypothesis.settings.register_profile("winnow", deadline=None)
hypothesis.settings.load_profile("winnow")

# Markers and fixtures of servers. One worker starts each for all tests that need it. The slowest
# is first.
SERVERS = ("vllm", "s3", "prefect_url")


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(1)


@pytest.hookimpl(tryfirst=True)  # before xdist reads the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.get_closest_marker("vllm") or item.get_closest_marker("s3"):
            item.add_marker("slow")  # their servers take a minute to start
    skip_without_components(items)
    order_and_group(items)


def order_and_group(items: list[pytest.Item]) -> None:
    """Put the slowest tests first: all tests of a server in one group, then slow tests one by one
    (those with a mark `xdist_group` together), then the other tests by file, since tests of a file
    share fixtures."""

    def place(item: pytest.Item) -> int:
        names = {mark.name for mark in item.iter_markers()} | set(item.fixturenames)
        server = next((n for n, name in enumerate(SERVERS) if name in names), None)
        if server is not None:
            item.add_marker(pytest.mark.xdist_group(SERVERS[server]))
            return server
        if "slow" in names:
            return len(SERVERS)
        if "xdist_group" not in names:
            item.add_marker(pytest.mark.xdist_group(f"{item.path.parent.name}/{item.path.stem}"))
        return len(SERVERS) + 1

    items.sort(key=place)


def skip_without_components(items: list[pytest.Item]) -> None:
    """Skip tests whose component is missing, with the reason. In CI it is an error to miss a
    component that CI installs."""
    missing = {
        "vllm": None
        if importlib.util.find_spec("vllm")
        else "vLLM is not installed (make test VLLM=cpu)",
        "gpu": None if torch.cuda.is_available() else "no NVIDIA GPU",
        "s3": s3_server.missing(),
        "sandbox": sandbox.problem(Sandbox("bubblewrap", 512, False)),
        "browser": browser.missing(),
        "real_data": None if os.environ.get("WINNOW_REAL_DATA") else "WINNOW_REAL_DATA is not set",
    }
    for name in ("vllm", "s3", "sandbox", "browser"):
        if os.environ.get("CI") and missing[name]:
            raise pytest.UsageError(
                f"CI installs what the tests marked {name} need, and may not skip them: "
                f"{missing[name]}"
            )
    for item in items:
        for name, reason in missing.items():
            if reason and item.get_closest_marker(name):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def real_data() -> Path:
    """Return the folder of real data files."""
    return Path(os.environ["WINNOW_REAL_DATA"])


@pytest.fixture(scope="session", autouse=True)
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Put the folders of `once`, which all workers share, beside their temporary folders."""
    base = tmp_path_factory.getbasetemp()
    once.folder = base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="session")
def qwen() -> Path:
    """Return a small Qwen3 (tied embeddings, character tokenizer) with random weights."""
    return once.once("qwen", lambda folder: make_policy(folder, "qwen3"))


@pytest.fixture(scope="session")
def llama() -> Path:
    """Return a small Llama (grouped queries, untied head, BPE tokenizer with a start token)."""
    return once.once("llama", lambda folder: make_policy(folder, "llama"))


@pytest.fixture(scope="session")
def guesser() -> Path:
    """Return a small Qwen3 that answers sums with a random digit, a third of them correctly."""
    return once.once("guesser", make_guesser)


@pytest.fixture
def prefilled(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the length of each prompt that the engine `hf` prefills."""
    lengths, prefill = list[int](), Slots.prefill

    def spied(slots: Slots, prompts: Sequence[Sequence[int]]) -> Prefill:
        lengths.extend(map(len, prompts))
        return prefill(slots, prompts)

    monkeypatch.setattr(Slots, "prefill", spied)
    return lengths


@pytest.fixture(scope="session")
def fork_server() -> Iterator[str]:
    """Start a fork server with the libraries of the stages, as a flow does. Yield its address."""
    with temporary_folder(None, "winnow") as folder:
        address = folder / "forks"
        line = commands.launcher("forks", str(address))
        with subprocess.Popen(line, cwd=commands.CODE, process_group=0) as server:
            wait_for(address.exists)
            yield str(address)
            server.kill()


@pytest.fixture
def forked_stages(fork_server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the stages that a test starts, as a flow does, so that they need not import torch."""
    if forks.are_possible():
        monkeypatch.setenv(forks.ADDRESS, fork_server)


@pytest.fixture(scope="session")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[s3_server.S3Server]:
    """Start a real S3 server, for tests marked `s3`. Use `bucket` instead, unless the test stops
    the server."""
    server = s3_server.S3Server(tmp_path_factory.mktemp("s3"))
    yield server
    server.stop()


@pytest.fixture
def bucket(s3: s3_server.S3Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Return a new bucket, `s3://...`. The environment is set for this test and its commands."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in s3.environment().items():
        monkeypatch.setenv(name, value)
    S3FileSystem.clear_instance_cache()  # cached instances ignore changes of the environment
    files, name = open_location(f"s3://test-{uuid.uuid4().hex[:12]}")
    files.mkdir(name)
    yield f"s3://{name}"
    S3FileSystem.clear_instance_cache()
