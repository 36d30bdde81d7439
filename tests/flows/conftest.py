"""A scratch project per test: the real dvc.yaml and flows with stages that take milliseconds."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from flows.pipeline import commands
from flows.serve import server
from tasks.common.processes.ports import free_port
from tests.flows.project import ROOT, Project, build, shell


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Return an environment in which Prefect and DVC write to a temporary folder only."""
    home = tmp_path_factory.mktemp("home")
    ours = {
        "PREFECT_HOME": str(home / "prefect"),
        "PREFECT_LOCAL_STORAGE_PATH": str(home / "prefect" / "storage"),
        "DVC_SITE_CACHE_DIR": str(home / "dvc"),
        "NO_PROXY": "127.0.0.1",
    }
    return {**commands.environment(), **ours}


@pytest.fixture(scope="session")
def prefect_url(environment: dict[str, str]) -> Iterator[str]:
    """Start one Prefect server for all tests: its start takes longer than most tests."""
    port = free_port()
    child = subprocess.Popen(
        commands.launcher(*server.arguments(server.HOST, port, "critical")),
        cwd=ROOT,
        env={**environment, **server.settings(server.HOST, None), **server.FOR_ONE_RUN},
        process_group=0,
    )
    try:
        assert server.comes_up(child, f"http://127.0.0.1:{port}/api/health")
        yield f"http://127.0.0.1:{port}/api"
    finally:
        commands.end_groups([child])


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory, environment: dict[str, str]) -> Path:
    """Return a committed project whose stages have all run."""
    root = build(tmp_path_factory.mktemp("finished") / "project")
    shell(root, environment, sys.executable, "-m", "dvc", "repro", "--quiet")
    shell(root, environment, "git", "add", "--all")
    shell(root, environment, "git", "commit", "--quiet", "--message", "run")
    return root


@pytest.fixture
def project(
    tmp_path: Path, finished: Path, environment: dict[str, str], prefect_url: str
) -> Project:
    """Return a copy of the finished project, for changes and further runs."""
    root = tmp_path / "project"
    shutil.copytree(finished, root, symlinks=True)
    return Project(root, {**environment, "PREFECT_API_URL": prefect_url})


@pytest.fixture(autouse=True)
def no_process_left(tmp_path: Path) -> Iterator[None]:
    """Check that no stage outlives its test."""
    yield
    for pid in tmp_path.glob("**/*.hanging.pid"):
        assert not os.path.exists(f"/proc/{json.loads(pid.read_text())}")
