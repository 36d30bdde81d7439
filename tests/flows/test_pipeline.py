"""The flow and DVC on a scratch project: the stages that run, and the messages of both."""

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest

from tests.flows.project import Project, lines, shell
from tests.patience import PATIENCE

NUM_STAGES = 15  # of the scratch project's experiment
FINAL = {"COMPLETED", "FAILED", "CRASHED", "CANCELLED", "NotReady"}
CELLS = ["evaluate@grpo-0", "evaluate@sgpo-0", "evaluate@winnow-0"]


def task_states(project: Project) -> list[tuple[str, str, str]]:
    """Return (task, name of its state, version) of the newest flow run, from the Prefect server."""
    return [(task["name"], task["state_name"], task["task_version"]) for task in task_runs(project)]


def messages(project: Project) -> list[tuple[str, str]]:
    """Return (task, message of its state) of the newest flow run."""
    return [(task["name"], task["state"]["message"]) for task in task_runs(project)]


def task_runs(project: Project) -> list[dict[str, Any]]:
    """Return the task runs of the newest flow run, after those of all stages have been recorded.
    The server records them from events, with a delay."""
    chosen = {"flow_runs": {"id": {"any_": [flow_run(project)["id"]]}}}
    end = time.monotonic() + PATIENCE
    while True:
        found = list(project.post("task_runs/filter", chosen))
        ended = [task for task in found if {task["state_type"], task["state_name"]} & FINAL]
        if len(ended) == NUM_STAGES or time.monotonic() > end:
            return found
        time.sleep(0.2)


def flow_run(project: Project) -> dict[str, Any]:
    """Return the newest flow run that has started. Runs that another test has scheduled for later
    days sort before it."""
    started = {"start_time": {"is_null_": False}}
    query = {"flow_runs": started, "sort": "START_TIME_DESC", "limit": 1}
    (run,) = project.post("flow_runs/filter", query)
    return dict(run)


def test_flow_after_dvc_has_nothing_to_do(project: Project) -> None:
    output = project.flow()
    assert "nothing to do: all 15 stages are up to date" in output
    assert lines(output, "") == []
    assert (project.root / "data/report/leaderboard.txt").read_text().strip() in output
    assert all(place in output for place in ("report/index.html", "mlflow.db", "http://127.0.0.1:"))
    assert not (project.root / "data/tracking").exists()
    states = task_states(project)
    assert {name for _, name, _ in states} == {"Cached"}
    versions = {task: version for task, _, version in states}
    assert versions["train@grpo-0"] == versions["train@sgpo-0"] != versions["ingest"]


def check_shown(project: Project) -> None:
    """Check that Prefect shows the run, the output of its stages, and the leaderboard."""
    run = flow_run(project)
    recipes = "grpo, sgpo, winnow"
    changed = "evaluate.num_samples 4 -> 9"
    assert run["name"] == f"up to 5 of 15 stages · {recipes} · code: {changed}"
    query = {"logs": {"flow_run_id": {"any_": [run["id"]]}}, "limit": 200}
    logged = [line["message"] for line in project.post("logs/filter", query)]
    assert any("this is evaluate@winnow-0, live" in line for line in logged)
    query = {"artifacts": {"key": {"any_": ["leaderboard"]}}, "limit": 1, "sort": "CREATED_DESC"}
    artifact = project.post("artifacts/filter", query)[0]
    assert artifact["flow_run_id"] == run["id"]
    assert (project.root / "data/report/leaderboard.txt").read_text().strip() in artifact["data"]


@pytest.mark.slow
def test_changed_parameter_runs_its_readers_and_the_old_value_restores_them(
    project: Project,
) -> None:
    project.edit("params.yaml", r"^  num_samples: 4\n  pass_at", "  num_samples: 9\n  pass_at")
    output = project.flow()
    check_shown(project)
    assert lines(output, "ran") == ["code", "baseline", *CELLS, "report"]
    assert "baseline: starts (evaluate.num_samples 4 -> 9)" in output
    assert "report: starts (data/baseline/metrics.json " in output
    assert project.record()["status"] == "FINISHED"
    assert ["train", "sgpo", 0] in project.record()["cached"]
    assert project.status() == {}
    project.edit("params.yaml", "num_samples: 9", "num_samples: 4")
    output = project.flow()
    assert lines(output, "restored") == ["baseline", *CELLS]
    assert ("baseline", "Restored") in {(task, state) for task, state, _ in task_states(project)}
    # metrics are in git, not in DVC's run cache
    assert lines(output, "ran") == ["code", "report"]
    assert "didn't change" in project.dvc("repro")


def test_equal_outputs_do_not_run_later_stages(project: Project) -> None:
    project.edit("tasks/profile/real.py", r"\Z", "MORE = 1\n")
    project.edit("params.yaml", r"^  uri: null.*\n", "")  # leaves an empty section
    output = project.flow("--force", "ingest")
    reason = next(message for task, message in messages(project) if task == "profile")
    code = "code tasks/profile/real.py changed"
    assert reason == f"{code}; 40 rollouts reused, 8 sampled: 1 prompt new to the store"
    assert "ingest: starts (requested by --force)" in output
    assert f"profile: starts ({code})" in output
    assert lines(output, "starts") == ["ingest", "profile"]
    assert lines(output, "ran") == ["code", "ingest", "profile"]
    assert lines(output, "up to date")[-1] == "report"


def test_failed_stage_blocks_its_dependents(
    project: Project, notified: list[dict[str, str]]
) -> None:
    project.edit("params.yaml", r"^  passes: 4", "  passes: 5")
    project.behave(allocate__sgpo_0="fail")
    output = project.flow(expect=1)
    (sent,) = notified
    assert sent["subject"].startswith("winnow: up to 10 of ")
    assert "failed: allocate@sgpo-0" in sent["body"]
    assert lines(output, "FAILED") == ["allocate@sgpo-0"]
    assert lines(output, "not run") == ["train@sgpo-0", "evaluate@sgpo-0", "report"]
    assert "train@sgpo-0: not run (it needs allocate@sgpo-0)" in output
    stages, recipes = (
        ("allocate@{}-0", "train@{}-0", "evaluate@{}-0"),
        ("grpo", "winnow"),
    )
    others = [stage.format(recipe) for stage in stages for recipe in recipes]
    assert lines(output, "ran") == ["code", *others]
    assert project.record()["status"] == "FAILED"
    assert "this is allocate@sgpo-0, live" in output
    message = dict(messages(project))["allocate@sgpo-0"]
    assert "dvc repro -s allocate@sgpo-0" in message
    assert "this is allocate@sgpo-0, live" in message.partition("Its last lines:")[2]
    assert not any("this is" in line for line in output.splitlines() if "FAILED" in line)


@pytest.fixture
def notified(project: Project) -> Iterator[list[dict[str, str]]]:
    """Collect the notifications of the project's flows."""
    received: list[dict[str, str]] = []

    class Hook(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            received.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

    hook = ThreadingHTTPServer(("127.0.0.1", 0), Hook)
    Thread(target=hook.serve_forever, daemon=True).start()
    block = (
        "from prefect.blocks.notifications import CustomWebhookNotificationBlock as Block\n"
        f"Block(name='w', url='http://127.0.0.1:{hook.server_port}', allow_private_urls=True, "
        "json_data={'subject': '{{subject}}', 'body': '{{body}}'}).save('winnow', overwrite=True)"
    )
    shell(project.root, project.environment, sys.executable, "-c", block)
    project.environment["WINNOW_NOTIFY"] = "custom-webhook/winnow"
    yield received
    hook.shutdown()


@pytest.mark.slow
def test_flow_runs_without_the_named_server(project: Project) -> None:
    project.environment["PREFECT_API_URL"] = "http://127.0.0.1:9/api"
    project.edit("params.yaml", r"^  passes: 4", "  passes: 5")
    output = project.flow("grpo")
    assert "Prefect's server at http://127.0.0.1:9/api does not respond" in output
    assert lines(output, "ran") == ["code", "allocate@grpo-0", "train@grpo-0", "evaluate@grpo-0"]


@pytest.mark.slow
def test_overrides_are_recorded_and_undone(project: Project) -> None:
    before = (project.root / "params.yaml").read_text()
    output = project.flow("grpo", "--set", "allocate.passes=5")
    assert lines(output, "ran") == ["code", "allocate@grpo-0", "train@grpo-0", "evaluate@grpo-0"]
    assert "the report waits for all cells" in output
    assert "no table of allocate@grpo-0 in Prefect" in output  # it is no JSON in this project
    assert "allocate@grpo-0: starts (allocate.passes 4 -> 5)" in output
    assert "params.yaml is restored; the outputs in data were made with allocate" in output
    assert (project.root / "params.yaml").read_text() == before
    assert flow_run(project)["parameters"]["overrides"] == ["allocate.passes=5"]
    assert "code" in project.status()  # the next run restores the outputs


def test_fresh_clone_runs_and_stays_clean(project: Project) -> None:
    clone = Project(project.root.parent / "clone", project.environment)
    subprocess.run(["git", "clone", "--quiet", str(project.root), str(clone.root)], check=True)
    output = clone.dvc("repro")
    assert "Stage 'policy' didn't change" in output
    assert output.count("Running stage") == 14  # all but `policy`
    assert shell(clone.root, clone.environment, "git", "status", "--porcelain") == ""
    assert clone.status() == {}


def test_matrix_follows_the_parameters(project: Project) -> None:
    project.dvc("exp", "run", "--quiet", "--set-param", "experiment.recipes=[grpo]")
    assert "sgpo" not in project.dvc("stage", "list", "--name-only")
    assert project.status() == {}


@pytest.mark.parametrize("axis", ["recipes", "seeds"])
def test_parameters_do_not_reach_a_shell(project: Project, axis: str) -> None:
    project.edit("params.yaml", rf"^  {axis}: \[[^]]*\]", f'  {axis}: ["$(touch reached)"]')
    names = project.dvc("stage", "list", "--name-only").splitlines()
    cells = [name for name in names if "$" in name]
    assert len(cells) == 3 * {"recipes": 1, "seeds": 3}[axis]
    for target in ([], ["--single-item", cells[0]]):
        done = subprocess.run(
            [sys.executable, "-m", "dvc", "repro", *target],
            cwd=project.root,
            env=project.environment,
            capture_output=True,
        )
        assert done.returncode
    assert "$(touch reached)" in project.flow(expect=1)
    assert not (project.root / "reached").exists()


def test_flow_without_git_names_the_remedy(project: Project) -> None:
    shutil.rmtree(project.root / ".git")
    output = project.flow(expect=1)
    assert "dvc config --local core.no_scm true" in output
    assert "Traceback" not in output
    project.dvc("config", "--local", "core.no_scm", "true")
    assert "nothing to do" in project.flow()
