"""A scratch project per test: the real dvc.yaml and flows over stages that take milliseconds."""

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
    """An environment whose Prefect and DVC keep everything in a temporary folder."""
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
    """One Prefect server for all tests: starting it takes longer than most of them."""
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
    """A project on which `dvc repro` has run, everything committed."""
    root = build(tmp_path_factory.mktemp("finished") / "project")
    shell(root, environment, sys.executable, "-m", "dvc", "repro", "--quiet")
    shell(root, environment, "git", "add", "--all")
    shell(root, environment, "git", "commit", "--quiet", "--message", "run")
    return root


@pytest.fixture
def project(
    tmp_path: Path, finished: Path, environment: dict[str, str], prefect_url: str
) -> Project:
    """A copy of the finished project, to change and run again."""
    root = tmp_path / "project"
    shutil.copytree(finished, root, symlinks=True)
    return Project(root, {**environment, "PREFECT_API_URL": prefect_url})


@pytest.fixture(autouse=True)
def nothing_left_behind(tmp_path: Path) -> Iterator[None]:
    """No stage may outlive its test."""
    yield
    for pid in tmp_path.glob("**/*.hanging.pid"):
        assert not os.path.exists(f"/proc/{json.loads(pid.read_text())}")
