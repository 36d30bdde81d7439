"""Processes end with their parents, at any time and under any new parent."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tasks.common.processes.guard import guarded
from tests.patience import PATIENCE, is_running, wait_for
from tests.test_imports import ROOT

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux alone ends orphans")

CHILD = """
import os, sys, time
parent = os.getppid()
print(os.getpid(), flush=True)
while sys.argv[2] == "imports" and os.getppid() == parent:  # until the parent is gone
    time.sleep(0.01)
from tasks.common.processes.ending import die_with_parent
die_with_parent()
open(sys.argv[1], "a").write("alive ")
time.sleep(float(sys.argv[3]))
open(sys.argv[1], "a").write("still alive")
"""
ADOPTER = """
import ctypes, signal, subprocess, sys
signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # it reaps them, too
ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: as the first process of a container
subprocess.Popen(sys.argv[1:])
sys.stdin.read()
"""
PARENT = "import subprocess, sys; subprocess.run([sys.executable, '-c', *sys.argv[1:]])"
PIPES = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
SESSION: dict[str, Any] = {**PIPES, "text": True, "start_new_session": True}


def test_stage_ends_with_dvc(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    marker.touch()
    environment = {**os.environ, "DVC_STAGE": "train"}
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, CHILD, str(marker), "running", "30"],
        stdout=subprocess.PIPE,
        env=environment,
        start_new_session=True,
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    wait_for(marker.read_text)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    wait_for(lambda: not is_running(child))
    assert marker.read_text() == "alive "


def in_a_container(*command: str, **options: Any) -> "subprocess.Popen[str]":
    """Start a command whose orphans are adopted by a process of its own session, until the standard
    input ends."""
    return subprocess.Popen([sys.executable, "-c", ADOPTER, *command], **SESSION, **options)


@pytest.mark.parametrize("evidence", ["variable of the flow", "lock of dvc"])
def test_stage_ends_with_dvc_in_a_container(evidence: str, tmp_path: Path) -> None:
    """dvc is killed while the stage imports, and process 1 is in dvc's own session."""
    marker, lock = tmp_path / "marker", tmp_path / ".dvc" / "tmp" / "rwlock"
    marker.touch()
    lock.parent.mkdir(parents=True)
    note = "os.environ['WINNOW_PARENT'] = str(os.getpid())"
    if evidence == "lock of dvc":
        note = (
            "json.dump({'write': {'/out': {'pid': os.getpid(), 'cmd': 'dvc repro'}}}, "
            f"open({str(lock)!r}, 'w'))"
        )
    parent = f"import json, os; {note}; {PARENT}"
    stage = [sys.executable, "-c", parent, CHILD, str(marker), "imports", "30"]
    environment = {**os.environ, "DVC_STAGE": "train", "PYTHONPATH": str(ROOT)}
    container = in_a_container(*stage, env=environment, cwd=tmp_path)
    assert container.stdin is not None
    assert container.stdout is not None
    child = int(container.stdout.readline())
    psutil.Process(child).parent().kill()
    wait_for(lambda: marker.read_text() or not is_running(child))
    assert marker.read_text() == ""
    container.stdin.close()
    container.wait()


def test_stage_below_a_shell_of_dvc_continues(tmp_path: Path) -> None:
    """A pipe or a list of commands runs in a shell between dvc and the stage."""
    marker = tmp_path / "marker"
    shell = ["sh", "-c", '"$@"; true', "sh", sys.executable, "-c", CHILD, str(marker)]
    parent = f"import os; os.environ['WINNOW_PARENT'] = str(os.getpid()); {PARENT}"
    line = parent.replace("[sys.executable, '-c', *sys.argv[1:]]", "sys.argv[1:]")
    subprocess.run(
        [sys.executable, "-c", line, *shell, "running", "0"],
        check=True,
        env={**os.environ, "DVC_STAGE": "train"},
        capture_output=True,
    )
    assert marker.read_text() == "alive still alive"


@pytest.mark.parametrize(
    "stage", sorted(path.parent.name for path in ROOT.glob("tasks/*/__main__.py"))
)
def test_stage_checks_for_dvc_before_its_imports(stage: str) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    environment = {**os.environ, "DVC_STAGE": stage, "WINNOW_PARENT": str(ended.pid)}
    line = [sys.executable, "-X", "importtime", "-m", f"tasks.{stage}"]
    done = subprocess.run(line, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 130
    assert "tasks.common.processes.ending" in done.stderr
    assert "tasks.common.stage" not in done.stderr


GUARDED = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, lambda *_: sys.exit(print("saved", flush=True)))
subprocess.Popen(["sleep", "600"])
print("started", flush=True)
time.sleep(600)
print("went on")
"""


def leave(guard: "subprocess.Popen[str]") -> None:
    assert guard.stdin is not None
    guard.stdin.close()


@pytest.mark.parametrize(
    ("grace", "end", "last"),
    [(PATIENCE, leave, "saved\n"), (0.0, leave, ""), (PATIENCE, subprocess.Popen.kill, "")],
)
def test_guarded_command_ends_with_its_children(
    grace: float, end: Callable[["subprocess.Popen[str]"], None], last: str
) -> None:
    guard = subprocess.Popen(guarded([sys.executable, "-c", GUARDED], grace), **SESSION)
    assert guard.stdout is not None
    assert guard.stdout.readline() == "started\n"
    end(guard)
    assert guard.stdout.read() == last  # the pipe closes when all of them have ended
    assert guard.wait() in (0, -signal.SIGKILL)  # the command's own end, or the kill


def test_guard_has_the_status_of_its_command_and_ends_its_children() -> None:
    command = "import subprocess, sys; subprocess.Popen(['sleep', '600']); sys.exit(3)"
    guard = subprocess.Popen(guarded([sys.executable, "-c", command]), **SESSION)
    assert guard.stdout is not None
    assert guard.stdout.read() == ""
    assert guard.wait() == 3
