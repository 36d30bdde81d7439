"""Files that a dead process held are free again; those of the living are not."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flows import commands, holders
from tests.flows.project import ROOT, Project, lines

pytestmark = pytest.mark.skipif(not Path("/proc/self").exists(), reason="it looks into /proc")


def note(folder: Path, **written: tuple[int, str]) -> Path:
    """DVC's notes: who writes which file."""
    path = folder / ".dvc" / "tmp" / "rwlock"
    path.parent.mkdir(parents=True, exist_ok=True)
    writers = {name: {"pid": pid, "cmd": command} for name, (pid, command) in written.items()}
    path.write_text(json.dumps({"write": writers}))
    return path


@pytest.fixture
def zombie() -> Iterator[int]:
    child = subprocess.Popen([sys.executable, "-c", ""], stdout=subprocess.PIPE)
    assert child.stdout is not None
    child.stdout.read()
    yield child.pid
    child.wait()


@pytest.fixture
def flow_s_dvc(tmp_path: Path) -> Iterator[int]:
    """The dvc of a living flow in this repository."""
    requests, to_dvc = os.pipe()
    child = subprocess.Popen(
        commands.launcher("dvc", str(requests), "1"),
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        pass_fds=(requests,),
        stdout=subprocess.PIPE,
    )
    yield child.pid
    os.close(to_dvc)
    os.close(requests)
    child.communicate()


def test_only_the_living_hold_files(
    tmp_path: Path, zombie: int, flow_s_dvc: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    repro = [sys.executable, "-c", "import sys; sys.stdin.read()", "repro", "train"]
    dvc = subprocess.Popen(repro, stdin=subprocess.PIPE)
    flow_command = "/lib/dvc/__main__.py --wait-for-lock repro --single-item train@grpo-0"
    path = note(
        tmp_path,
        zombie=(zombie, "/bin/dvc repro"),
        reused=(dvc.pid, "/bin/dvc repro other"),
        own=(os.getpid(), " ".join(sys.argv)),
        dvc=(dvc.pid, "/a folder/dvc/__main__.py repro train"),
        flow=(flow_s_dvc, flow_command),
    )
    held: dict[str, Any] = json.loads(path.read_text())
    reader = {"pid": dvc.pid, "cmd": "/bin/dvc repro train"}
    held["read"] = {
        "both": [{"pid": zombie, "cmd": "dvc repro"}, reader],
        "dead": [held["write"]["own"]],
    }
    path.write_text(json.dumps(held))
    monkeypatch.chdir(tmp_path)
    holders.forget_dead()
    left = json.loads(path.read_text())
    assert set(left["write"]) == {"dvc", "flow"}
    assert left["read"] == {"both": [reader]}
    dvc.communicate()


def test_a_dvc_of_another_repository_holds_nothing_here(
    tmp_path: Path, flow_s_dvc: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = note(tmp_path / "other", flow=(flow_s_dvc, "dvc repro"))
    monkeypatch.chdir(tmp_path / "other")
    holders.forget_dead()
    assert json.loads(path.read_text())["write"] == {}


def test_a_flow_goes_on_where_a_killed_dvc_left_its_notes(project: Project, zombie: int) -> None:
    plan = str(project.root / "data/runs/grpo/0/plan/plan.parquet")
    profile = str(project.root / "data/profile")
    note(project.root, **{plan: (zombie, "dvc repro"), profile: (os.getpid(), "dvc repro")})
    project.edit("params.yaml", r"^  passes: 4", "  passes: 5")
    output = project.flow("--recipe", "grpo")
    assert "allocate@grpo-0" in lines(output, "ran")
    assert "they are free again" in output


def test_a_flow_goes_on_where_dvc_was_killed_while_it_wrote_its_notes(project: Project) -> None:
    note(project.root).write_text('{"write": {"/data/ru')
    project.edit("params.yaml", r"^  passes: 4", "  passes: 5")
    assert "allocate@grpo-0" in lines(project.flow("--recipe", "grpo"), "ran")


@pytest.mark.parametrize(
    ("place", "how"),
    [("data/profile/profile.parquet", "write"), ("data/code/profile.json", "read")],
)
def test_a_flow_waits_for_a_dvc_that_runs_a_stage_by_hand(
    project: Project, place: str, how: str
) -> None:
    """One that writes what a stage's state is asked of, and one that reads the digests of code that
    changed."""
    repro = [sys.executable, "-c", "import sys; sys.stdin.read()", "repro", "profile"]
    dvc = subprocess.Popen(repro, stdin=subprocess.PIPE)
    path = note(project.root)
    holder = {"pid": dvc.pid, "cmd": "/bin/dvc repro profile"}
    held = {str(project.root / place): [holder] if how == "read" else holder}
    path.write_text(json.dumps({how: held}))
    if how == "read":
        project.edit("tasks/profile/run.py", r"\A", "x = 0\n")
    flow = project.start("flows.pipeline", "--recipe", "grpo")
    assert flow.stdout is not None
    said = next(line for line in flow.stdout if "waiting for it" in line)
    assert f"process {dvc.pid}" in said
    path.write_text("{}")
    flow.communicate()
    assert flow.returncode == 0
    assert dvc.poll() is None
    dvc.communicate()
