"""The schedule: its deployment, and its end."""

import shutil
import signal
import sqlite3
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.flows.project import Project
from tests.flows.test_crashes import state_of
from tests.flows.test_processes import is_gone
from tests.patience import PATIENCE, wait_for

DEPLOYMENT = "refresh"


def deployment(project: Project, served: "subprocess.Popen[str]") -> dict[str, Any]:
    """Wait until the deployment is registered, and return it."""
    body = {"deployments": {"name": {"any_": [DEPLOYMENT]}}}

    def look() -> Any:
        assert served.poll() is None, served.communicate()[0]
        return project.post("deployments/filter", body)

    return dict(wait_for(look)[0])


@pytest.fixture(scope="module")
def project(
    tmp_path_factory: pytest.TempPathFactory,
    finished: Path,
    environment: dict[str, str],
    prefect_url: str,
) -> Project:
    """Return one copy of the finished project for all tests of this file."""
    root = tmp_path_factory.mktemp("served") / "project"
    shutil.copytree(finished, root, symlinks=True)
    return Project(root, {**environment, "PREFECT_API_URL": prefect_url})


@pytest.fixture(scope="module")
def served(project: Project) -> Iterator["subprocess.Popen[str]"]:
    """Start a schedule without due runs; the last test ends it."""
    project.edit("params.yaml", r"^  passes: 4", "  passes: 5")
    process = project.start("flows", "serve", "--cron", "0 0 29 2 *")
    yield process
    process.kill()
    process.communicate()


def run_now(project: Project, served: "subprocess.Popen[str]", **parameters: Any) -> str:
    """Request a run, and return its identity."""
    path = f"deployments/{deployment(project, served)['id']}/create_flow_run"
    return str(project.post(path, {"parameters": parameters})["id"])


def request_start(project: Project, run: str) -> str:
    """Request the start of a run, as a worker does, and return the name of the run's new state."""
    body = {"state": {"type": "PENDING"}}
    return str(project.post(f"flow_runs/{run}/set_state", body)["state"]["name"])


@pytest.mark.slow
def test_deployment_has_the_projects_name_and_watches_heartbeats(
    project: Project, served: "subprocess.Popen[str]"
) -> None:
    registered = deployment(project, served)
    assert registered["tags"] == [project.root.name]
    (flow,) = project.post("flows/filter", {"flows": {"id": {"any_": [registered["flow_id"]]}}})
    assert flow["name"] == project.root.name
    assert registered["parameters"]["force"] == ["ingest"]
    assert registered["parameters"]["retries"] == 1
    assert registered["global_concurrency_limit"]["limit"] == 1
    assert registered["concurrency_options"]["collision_strategy"] == "ENQUEUE"
    described = registered["parameter_openapi_schema"]["properties"]
    wanted = {"recipes", "seeds", "overrides", "data", "until"}
    assert all(described[name]["description"] for name in wanted)
    assert described["concurrency"]["minimum"] == 1
    found = project.post("automations/filter", {})
    (automation,) = [one for one in found if one["name"].startswith(f"{project.root.name}: ")]
    assert automation["enabled"]
    assert automation["trigger"]["posture"] == "Proactive"
    assert automation["actions"][0]["state"] == "CRASHED"


@pytest.mark.slow
def test_requests_are_answered_while_another_process_writes(project: Project) -> None:
    path = Path(project.environment["PREFECT_HOME"], "prefect.db")
    over = threading.Event()

    def write() -> None:
        with closing(sqlite3.connect(path, timeout=PATIENCE, isolation_level=None)) as database:
            while not over.wait(0.002):
                database.execute("UPDATE alembic_version SET version_num = version_num")

    with ThreadPoolExecutor(1) as thread:
        writes = thread.submit(write)
        try:
            flow = project.post("flows/", {"name": "busy"})["id"]
            body = {"name": "busy", "flow_id": flow}  # the server reads before it writes
            same = {project.post("deployments/", body)["id"] for _ in range(10)}
        finally:
            over.set()
    writes.result()
    assert len(same) == 1


@pytest.mark.slow
def test_run_with_forbidden_overrides_is_refused(
    project: Project, served: "subprocess.Popen[str]"
) -> None:
    overrides = ["allocate.passes=6", "policy.trust_remote_code=true", "policy.source=/tmp/policy"]
    before = (project.root / "params.yaml").read_text()
    run = run_now(project, served, overrides=overrides)
    wait_for(lambda: state_of(project, run)[0] in ("FAILED", "CRASHED"), served)
    state, message = state_of(project, run)
    assert state == "FAILED", message
    assert "policy.trust_remote_code cannot be set through Prefect" in message
    assert (project.root / "params.yaml").read_text() == before


@pytest.mark.slow
def test_runs_do_not_overlap_and_a_terminated_schedule_cancels_its_run(
    project: Project, served: "subprocess.Popen[str]"
) -> None:
    project.behave(allocate__grpo_0="hang")
    run = run_now(project, served)
    stage = project.hanging()
    second = run_now(project, served)
    assert request_start(project, second) == "AwaitingConcurrencySlot"
    project.post(f"flow_runs/{second}/set_state", {"state": {"type": "CANCELLED"}, "force": True})
    served.send_signal(signal.SIGTERM)
    output, _ = served.communicate(timeout=PATIENCE)
    assert served.returncode == 0, output
    assert (project.root / "graceful").read_text() == "allocate"
    assert is_gone(stage)
    assert state_of(project, run)[0] == "CANCELLED"
