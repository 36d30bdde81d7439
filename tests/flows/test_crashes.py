"""The states in Prefect of runs that were killed, are alive, or run on another machine."""

import fcntl
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from flows.pipeline import commands, crashes
from flows.serve import ui
from tasks.common.processes.ports import free_port
from tests.flows.project import Project
from tests.flows.test_pipeline import CELLS
from tests.flows.test_processes import descendants, is_gone
from tests.patience import wait_for
from tests.report.browser import Browser


def run_of(project: Project) -> str:
    (file,) = (project.root / "data/locks/runs").glob("[!.]*")
    return file.name


def state_of(project: Project, run: str) -> tuple[str, str]:
    found = project.post("flow_runs/filter", {"flow_runs": {"id": {"any_": [run]}}})
    return found[0]["state"]["type"], found[0]["state"]["message"] or ""


def tasks_of(project: Project, run: str) -> dict[str, str]:
    found: list[Any] = project.post("task_runs/filter", {"flow_runs": {"id": {"any_": [run]}}})
    return {task["name"]: task["state"]["type"] for task in found}


def running(project: Project, name: str = "other") -> str:
    """Register a running flow run of the project `name`, and return its id."""
    flow = project.post("flows/", {"name": name})
    body = {"flow_id": flow["id"], "state": {"type": "RUNNING"}}
    return str(project.post("flow_runs/", body)["id"])


def test_stages_end_with_a_killed_flow_and_the_next_run_marks_it(project: Project) -> None:
    """It marks no run of another machine, nor one that is alive."""
    project.behave(evaluate__grpo_0="hang", evaluate__winnow_0="hang")
    flow = project.start("flows", "run", "--concurrency", "2", "--force", *CELLS)
    stages = project.all_hanging(2)
    dvcs = [psutil.Process(stage).ppid() for stage in stages]
    killed, elsewhere, living = run_of(project), running(project), running(project)
    flow.kill()
    flow.wait(60)
    assert all(is_gone(stage) for stage in stages)
    assert all(is_gone(dvc) for dvc in dvcs)  # a zombie would hold its lock
    assert "evaluate@sgpo-0" not in project.status()  # it had ended before the kill
    assert state_of(project, killed)[0] == "RUNNING"
    with (project.root / "data/locks/runs" / living).open("w") as held:
        fcntl.flock(held, fcntl.LOCK_EX)  # as its process does
        lock = project.root / "dvc.lock"
        whole = lock.read_text()
        lock.write_text(whole[: len(whole) * 2 // 3])  # as if DVC had been writing it
        assert "dvc.lock was incomplete after a kill" in project.flow("sgpo")
        assert lock.read_text() == whole
        assert run_of(project) == living
    assert state_of(project, killed) == ("CRASHED", "Its process was killed; the next run resumes.")
    states = tasks_of(project, killed)
    assert {states[f"evaluate@{recipe}-0"] for recipe in ("grpo", "winnow")} == {"CRASHED"}
    assert not {"RUNNING", "PENDING"} & set(states.values())
    assert state_of(project, elsewhere)[0] == "RUNNING"
    assert state_of(project, living)[0] == "RUNNING"


def test_link_opens_the_latest_run_of_the_own_project(
    project: Project, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    runs = {name: running(project, name) for name in ("first", "second")}
    monkeypatch.setattr(crashes, "FOLDER", tmp_path)
    for name, run in runs.items():
        monkeypatch.setattr(commands, "NAME", name)
        url = project.environment["PREFECT_API_URL"]
        assert ui.latest_run(url, None) == f"runs/flow-run/{run}"


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
def test_pages_show_killed_runs_and_end_with_a_killed_command(
    project: Project, browser: Browser
) -> None:
    """Runs killed under another server are marked as crashed. The pages have both names of this
    machine. Their servers do not outlive `winnow ui`."""
    del project.environment["PREFECT_API_URL"]
    project.behave(report="hang")
    flow = project.start("flows", "run", "--force", "report")
    project.hanging()
    killed = run_of(project)
    flow.kill()
    flow.communicate()
    port, mlflow = str(free_port()), str(free_port())
    pages = project.start("flows", "ui", "--prefect-port", port, "--mlflow-port", mlflow)
    project.environment["PREFECT_API_URL"] = f"http://127.0.0.1:{port}/api"
    assert pages.stdout is not None
    output = list(iter(pages.stdout.readline, "Ctrl-C stops both\n"))
    urls = [f"http://127.0.0.1:{each}" for each in (port, mlflow)]
    assert output[-2] == f"Prefect   {urls[0]}/runs/flow-run/{killed}\n"
    assert output[-1].startswith(f"MLflow    {urls[1]}/#/experiments/")
    processes = descendants(pages.pid)
    assert len(processes) >= 4  # two servers, each with its guard
    wait_for(lambda: not (project.root / "data/locks/runs" / killed).exists())
    assert state_of(project, killed)[0] == "CRASHED"
    browser.resize(1200, 1600)  # runs below the window are not drawn
    for name in ("127.0.0.1", "localhost"):
        browser.call("Page.navigate", url=f"http://{name}:{port}/runs")
        wait_for(partial(shows_runs, browser, name))
    assert browser.problems == []
    pages.kill()
    pages.communicate()
    assert all(is_gone(pid) for pid in processes)
