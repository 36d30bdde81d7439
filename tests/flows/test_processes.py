"""No stage outlives its flow or dvc, however that ends."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from flows.pipeline import commands
from tasks.common.processes import ending
from tests.common.test_parent import in_a_container
from tests.flows.project import ROOT, Project
from tests.patience import PATIENCE, wait_for


def is_gone(pid: int) -> bool:
    return wait_for(lambda: not os.path.exists(f"/proc/{pid}"))


def descendants(pid: int) -> list[int]:
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [found for child in children for found in (int(child), *descendants(int(child)))]


@pytest.mark.parametrize("arguments", [("dvc", "0", "1"), ("forks", "address")])
def test_interrupt_at_the_start_of_a_child_leaves_no_traceback(
    arguments: tuple[str, ...], tmp_path: Path
) -> None:
    with ending.interrupts_blocked():
        helper = subprocess.Popen(
            commands.launcher(*arguments),
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
    helper.send_signal(signal.SIGINT)
    assert helper.communicate(timeout=PATIENCE)[0] == b""
    assert helper.returncode == 130


def test_stage_of_a_cancelled_flow_saves(project: Project) -> None:
    project.behave(baseline="hang")
    flow = project.start("flows", "run", "--force", "baseline")
    stage = project.hanging()
    latest = {"sort": "EXPECTED_START_TIME_DESC", "limit": 1}
    run = project.post("flow_runs/filter", latest)[0]["id"]
    project.post(f"flow_runs/{run}/set_state", {"state": {"type": "CANCELLING"}, "force": True})
    flow.communicate(timeout=PATIENCE)
    assert flow.returncode == 130
    assert (project.root / "graceful").exists()
    assert is_gone(stage)
    query = {"flow_runs": {"id": {"any_": [run]}}}
    assert project.post("flow_runs/filter", query)[0]["state"]["type"] == "CANCELLED"


def test_stage_ends_if_dvc_is_killed_in_a_container_during_imports(project: Project) -> None:
    project.edit("params.yaml", r"^  passes: 4", "  passes: 5")
    project.behave(allocate__grpo_0="import")
    repro = (sys.executable, "-m", "dvc", "repro", "allocate@grpo-0")
    container = in_a_container(*repro, cwd=project.root, env=project.environment)
    assert container.stdin is not None
    stage = project.hanging()
    psutil.Process(stage).parent().kill()
    assert is_gone(stage)
    container.stdin.close()
    container.wait()


def test_a_run_is_shown_while_it_lives_and_bad_requests_do_not_wait_for_it(
    project: Project,
) -> None:
    project.behave(baseline="hang")
    flow = project.start("flows", "run", "--force", "baseline")
    stage = project.hanging()
    first, second = wait_for(
        lambda: "41/100" in (text := project.winnow("status")) and text.splitlines()
    )
    assert f"run --force baseline` runs (process {flow.pid})" in first
    assert re.fullmatch(
        r"  baseline since \d\d:\d\d:\d\d \(0 min\)  baseline:  41% 41/100 \[.*", second
    )
    planned = project.winnow("plan", expect=1)
    assert planned.startswith(first)
    assert "ERROR" not in planned
    for arguments, message in (
        (["--set", "train.learning_rate=abc"], "learning_rate is 'abc', which is not a number"),
        (["grppo"], "recipe grppo is not in the experiment: it has grpo, sgpo, winnow"),
        (["--experiment", "grppo"], "grppo"),
        (["--seed", "7"], "seed 7 is not in the experiment"),
        (["--force", "train"], "stage train is not in the experiment"),
        (["--until", "profil"], "stage profil is not in the experiment"),
    ):
        output = project.flow(*arguments, expect=1)
        assert message in output
        assert "waiting for the pipeline" not in output
    flow.kill()
    flow.communicate()
    assert is_gone(stage)
    late = "nothing runs; 2 of 15 stages would or may run: `winnow plan` lists them\n"
    assert project.winnow("status").endswith(late)


def test_stages_of_an_interrupted_flow_save(project: Project) -> None:
    project.behave(evaluate__grpo_0="hang", evaluate__winnow_0="hang")
    forced = ("evaluate@grpo-0", "evaluate@winnow-0")
    flow = project.start("flows", "run", "--concurrency", "2", "--force", *forced)
    stages = project.all_hanging(2)
    os.killpg(flow.pid, signal.SIGINT)  # like Ctrl-C: the whole foreground group
    output, _ = flow.communicate(timeout=PATIENCE)
    assert flow.returncode == 130, output
    assert "interrupted; to resume: " in output
    assert "killing it" not in output  # dvc ended after the stages
    assert "Traceback" not in output
    assert "ERROR" not in output  # of dvc
    assert (project.root / "graceful").read_text() == "evaluateevaluate"
    assert all(is_gone(stage) for stage in stages)
    assert project.record()["status"] == "KILLED"
