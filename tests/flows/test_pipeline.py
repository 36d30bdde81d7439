"""The flow and DVC on a scratch project: the stages that run, and the messages of both."""

import re
import shutil
import subprocess
import sys
from typing import Any

import pytest

from tests.flows.project import Project, lines, shell
from tests.patience import wait_for

NUM_STAGES = 15  # of the scratch project's experiment
FINAL = {"COMPLETED", "FAILED", "CRASHED", "CANCELLED", "NotReady"}
CELLS = ["evaluate@grpo-0", "evaluate@sgpo-0", "evaluate@winnow-0"]


def task_states(project: Project) -> list[tuple[str, str, str]]:
    """Return (task, name of its state, version) of the newest flow run, from the Prefect server."""
    return [(task["name"], task["state_name"], task["task_version"]) for task in task_runs(project)]


def task_runs(project: Project, number: int = NUM_STAGES) -> list[dict[str, Any]]:
    """Return the task runs of the newest flow run, after the end of all `number` stages has been
    recorded. The server records them from events, with a delay."""
    chosen = {"flow_runs": {"id": {"any_": [flow_run(project)["id"]]}}}

    def ended() -> list[dict[str, Any]]:
        found = project.post("task_runs/filter", chosen)
        return [task for task in found if {task["state_type"], task["state_name"]} & FINAL]

    wait_for(lambda: len(ended()) == number)
    return ended()


def flow_run(project: Project) -> dict[str, Any]:
    """Return the newest flow run that has started. Runs that another test has scheduled for later
    days sort before it."""
    started = {"start_time": {"is_null_": False}}
    query = {"flow_runs": started, "sort": "START_TIME_DESC", "limit": 1}
    (run,) = project.post("flow_runs/filter", query)
    return dict(run)


def git_status(project: Project) -> str:
    """Return the files that differ from the last commit, one a line."""
    return shell(project.root, project.environment, "git", "status", "--porcelain")


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


def test_run_until_a_stage_leaves_out_the_others(project: Project) -> None:
    project.edit("params.yaml", r"^  num_samples: 8", "  num_samples: 9")
    assert "2 would run" in project.winnow("plan", "--until", "profile")
    output = project.flow("--until", "profile")
    assert lines(output, "starts") == ["profile"]
    assert "left out: baseline, allocate@grpo-0" in output
    assert "waits for all cells" not in output
    assert "4 stages: 2 ran, 2 cached" in output
    after = ["allocate@grpo-0", "allocate@sgpo-0", "allocate@winnow-0", "report"]
    assert sorted(project.status()) == after


def check_shown(project: Project) -> None:
    """Check that Prefect shows the run, the output of its stages, and the leaderboard."""
    run = flow_run(project)
    assert run["name"] == "all · 15 stages: 6 ran, 9 cached"
    query = {"logs": {"flow_run_id": {"any_": [run["id"]]}}, "limit": 200}
    logged = [line["message"] for line in project.post("logs/filter", query)]
    assert any("this is evaluate@winnow-0, live" in line for line in logged)
    query = {
        "artifacts": {"key": {"any_": [f"{project.root.name}-leaderboard"]}},
        "limit": 1,
        "sort": "CREATED_DESC",
    }
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
    project.edit("params.yaml", "num_samples: 9", "num_samples: 4")
    output = project.flow()
    assert lines(output, "restored") == ["baseline", *CELLS]
    assert ("baseline", "Restored") in {(task, state) for task, state, _ in task_states(project)}
    # metrics are in git, not in DVC's run cache
    assert lines(output, "ran") == ["code", "report"]
    assert "didn't change" in project.dvc("repro")
    assert git_status(project) == ""


@pytest.mark.slow
def test_overrides_are_undone_and_the_named_server_is_not_needed(project: Project) -> None:
    project.environment["PREFECT_API_URL"] = "http://127.0.0.1:9/api"
    before = (project.root / "params.yaml").read_text()
    output = project.flow("grpo", "--set", "allocate.passes=5")
    assert "Prefect's server at http://127.0.0.1:9/api does not respond" in output
    assert lines(output, "ran") == ["code", "allocate@grpo-0", "train@grpo-0", "evaluate@grpo-0"]
    assert "the report waits for all cells" in output
    assert "stale: this leaderboard is of an earlier run" in output
    assert "allocate@grpo-0: starts (allocate.passes 4 -> 5)" in output
    assert "params.yaml is restored; the outputs in data were made with allocate" in output
    assert (project.root / "params.yaml").read_text() == before
    assert "code" in project.status()  # the next run restores the outputs


def test_fresh_clone_runs_and_stays_clean(project: Project) -> None:
    """The other stages leave the project clean when a changed parameter repeats them, above."""
    clone = Project(project.root.parent / "clone", project.environment)
    subprocess.run(["git", "clone", "--quiet", str(project.root), str(clone.root)], check=True)
    output = clone.dvc("repro", "train@grpo-0")
    ran = ["code", "ingest", "policy", "profile", "allocate@grpo-0", "train@grpo-0"]
    assert sorted(re.findall("Running stage '(.*)'", output)) == sorted(ran)
    assert git_status(clone) == ""
    assert not {*ran} & clone.status().keys()


def test_matrix_follows_the_parameters(project: Project) -> None:
    project.dvc("exp", "run", "--quiet", "--set-param", "experiment.recipes=[grpo]")
    assert "sgpo" not in project.dvc("stage", "list", "--name-only")
    assert project.status() == {}


def test_parameters_do_not_reach_a_shell(project: Project) -> None:
    axes = ("recipes", "seeds")
    for axis in axes:
        project.edit(
            "params.yaml", rf"^  {axis}: \[[^]]*\]", f'  {axis}: ["$(touch reached_{axis})"]'
        )
    names = project.dvc("stage", "list", "--name-only").splitlines()
    cells = [name for name in names if all(f"reached_{axis}" in name for axis in axes)]
    assert len(cells) == 3
    for target in ([], ["--single-item", cells[0]]):
        done = subprocess.run(
            [sys.executable, "-m", "dvc", "repro", *target],
            cwd=project.root,
            env=project.environment,
            capture_output=True,
        )
        assert done.returncode
    assert "$(touch reached_recipes)" in project.flow(expect=1)
    assert list(project.root.glob("reached*")) == []


def test_flow_without_git_names_the_remedy(project: Project) -> None:
    shutil.rmtree(project.root / ".git")
    output = project.flow(expect=1)
    assert "dvc config --local core.no_scm true" in output
    assert "Traceback" not in output
    project.dvc("config", "--local", "core.no_scm", "true")
    assert "nothing to do" in project.without_server().flow()
