"""The states in Prefect of runs that were killed, are alive, or run on another machine."""

import fcntl
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from tasks.common.processes.ports import free_port
from tests.flows.project import Project
from tests.patience import PATIENCE, wait_for
from tests.report.browser import Browser


def run_of(project: Project) -> str:
    """Return the id of the running flow run."""
    (file,) = (project.root / "data/locks/runs").glob("[!.]*")
    return file.name


def state_of(project: Project, run: str) -> tuple[str, str]:
    """Return (type, message) of a run's state."""
    found = project.post("flow_runs/filter", {"flow_runs": {"id": {"any_": [run]}}})
    return found[0]["state"]["type"], found[0]["state"]["message"] or ""


def tasks_of(project: Project, run: str) -> dict[str, str]:
    """Return the states of the run's tasks."""
    found: list[Any] = project.post("task_runs/filter", {"flow_runs": {"id": {"any_": [run]}}})
    return {task["name"]: task["state"]["type"] for task in found}


def running(project: Project) -> str:
    """Register a running flow run, and return its id."""
    flow = project.post("flows/", {"name": "winnow"})
    body = {"flow_id": flow["id"], "state": {"type": "RUNNING"}}
    return str(project.post("flow_runs/", body)["id"])


def test_next_run_marks_only_killed_runs(project: Project) -> None:
    project.behave(report="hang")
    flow = project.start("flows", "run", "--force", "report")
    project.hanging()
    killed, elsewhere, living = run_of(project), running(project), running(project)
    children = psutil.Process(flow.pid).children(recursive=True)
    flow.kill()
    flow.communicate()
    psutil.wait_procs(children, PATIENCE)  # they hold DVC's lock until they end
    assert state_of(project, killed)[0] == "RUNNING"
    (project.root / "behaviour.json").unlink()
    with (project.root / "data/locks/runs" / living).open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)  # as its process does
        project.flow()
        assert run_of(project) == living
    assert state_of(project, killed) == ("CRASHED", "Its process was killed; the next run resumes.")
    assert tasks_of(project, killed)["report"] == "CRASHED"
    assert not {"RUNNING", "PENDING"} & set(tasks_of(project, killed).values())
    assert state_of(project, elsewhere)[0] == "RUNNING"
    assert state_of(project, living)[0] == "RUNNING"


def shows_runs(browser: Browser, name: str) -> bool:
    """Return whether the page of the server under this name shows a run."""
    text = str(browser.run("location.host + (document.body ? document.body.innerText : '')"))
    return text.startswith(name) and "of 15 stages" in text


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    browser = Browser(tmp_path / "chromium")
    yield browser
    browser.close()


@pytest.mark.slow
@pytest.mark.browser
def test_pages_show_runs_killed_under_another_server(project: Project, browser: Browser) -> None:
    """They are marked as crashed, and shown under both names of this machine."""
    del project.environment["PREFECT_API_URL"]
    project.behave(report="hang")
    flow = project.start("flows", "run", "--force", "report")
    project.hanging()
    killed = run_of(project)
    flow.kill()
    flow.communicate()
    port = str(free_port())
    ports = ("--prefect-port", port, "--mlflow-port", str(free_port()))
    pages = project.start("flows", "ui", *ports)
    project.environment["PREFECT_API_URL"] = f"http://127.0.0.1:{port}/api"
    assert pages.stdout is not None
    output = list(iter(pages.stdout.readline, "Ctrl-C stops both\n"))
    assert f"Prefect   http://127.0.0.1:{port}/runs/flow-run/{killed}\n" in output
    wait_for(lambda: not (project.root / "data/locks/runs" / killed).exists())
    assert state_of(project, killed)[0] == "CRASHED"
    browser.resize(1200, 1600)  # runs below the window are not drawn
    for name in ("127.0.0.1", "localhost"):
        browser.call("Page.navigate", url=f"http://{name}:{port}/runs")
        wait_for(partial(shows_runs, browser, name))
    assert browser.problems == []
    pages.terminate()
    pages.communicate()
