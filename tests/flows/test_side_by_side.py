"""Stages side by side: their order, their GPUs, their output, and their failures."""

import json
import os
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from flows.pipeline.selection import sorter
from flows.pipeline.side_by_side import Placing
from tests.flows.project import Project, lines, shell
from tests.flows.test_pipeline import task_runs

NEEDS = {"data": set(), "a": {"data"}, "b": {"data"}, "ab": {"a", "b"}, "end": {"ab"}}


def test_stages_of_other_runs_are_ignored() -> None:
    assert sorter({stage: NEEDS[stage] for stage in ("ab", "end")}).get_ready() == ("ab",)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the section `engine` of a machine with the GPUs 4, 5 and 7."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,7")
    return {"device": "auto", "num_processes": 1, "num_replicas": 1}


def test_each_stage_has_its_own_gpu(engine: dict[str, Any]) -> None:
    placing = Placing.of({"engine": engine}, 4)
    assert placing.take("allocate@grpo-0") == []
    taken = [placing.take(f"train@grpo-{seed}") for seed in range(3)]
    assert taken == [["4"], ["5"], ["7"]]
    assert placing.environment(["5"]) == {"CUDA_VISIBLE_DEVICES": "5"}
    assert placing.environment([]) == {}
    placing.users.subtract(["5"])
    assert placing.take("evaluate@grpo-0") == ["5"]
    assert placing.take("profile") == ["4"]  # all are in use: the stage waits for its lock


@pytest.mark.parametrize(
    ("changes", "concurrency", "taken"),
    [
        ({}, 1, ["4"]),
        ({"num_processes": 2}, 4, ["4", "5"]),
        ({"num_replicas": 3}, 4, ["4", "5", "7"]),
        ({"name": "server", "num_replicas": 1}, 4, ["4", "5"]),
        ({"device": "cpu"}, 4, []),
    ],
)
def test_gpus_of_a_stage_without_its_own(
    changes: dict[str, Any], concurrency: int, taken: list[str], engine: dict[str, Any]
) -> None:
    placing = Placing.of({"engine": {**engine, **changes}}, concurrency)
    assert placing.take("train@grpo-0") == taken
    assert placing.environment(taken) == {}


def test_empty_section_is_the_default(engine: dict[str, Any]) -> None:
    stage = "train@grpo-0"
    assert Placing.of({"engine": None}, 1).take(stage) == Placing.of({}, 1).take(stage)


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


def test_failed_cells_do_not_stop_the_others(
    project: Project, notified: list[dict[str, str]]
) -> None:
    """One fails in its command, the other because of DVC's lock on one of its outputs."""
    project.edit("params.yaml", r"^  passes: 4", "  passes: 5")
    project.behave(train__grpo_0="meet", train__winnow_0="meet", allocate__sgpo_0="fail")
    notes = hold(project, "data/runs/winnow/0/eval/metrics.json")
    project.environment["CUDA_VISIBLE_DEVICES"] = "4,7"
    output = project.flow("--concurrency", "3", expect=1)
    assert "failed: allocate@sgpo-0, evaluate@winnow-0;" in output
    assert sorted(lines(output, "FAILED")) == ["allocate@sgpo-0", "evaluate@winnow-0"]
    assert lines(output, "not run") == ["train@sgpo-0", "evaluate@sgpo-0", "report"]
    assert "train@sgpo-0: not run (it needs allocate@sgpo-0)" in output
    others = ["allocate@grpo-0", "allocate@winnow-0", "code", "evaluate@grpo-0"]
    assert sorted(lines(output, "ran")) == [*others, "train@grpo-0", "train@winnow-0"]
    assert f"if no dvc runs here, remove '{notes}'" in output
    assert "Traceback" not in output
    assert not any("this is" in line for line in output.splitlines() if "FAILED" in line)
    assert "\ntrain@grpo-0 | this is train@grpo-0, live\n" in output
    stale = {"allocate@sgpo-0", "train@sgpo-0", "evaluate@winnow-0", "report"}
    assert set(project.status()) == stale
    assert (project.root / "data/report/index.html").read_text() == "grpo/0"  # of the ended cells
    assert project.record()["status"] == "FAILED"
    (sent,) = notified
    assert sent["subject"].startswith(
        f"{project.root.name}: all · 15 stages: 6 ran, 4 cached, 2 failed, 3"
    )
    assert "failed: allocate@sgpo-0, evaluate@winnow-0" in sent["body"]
    runs = {task["name"]: task for task in task_runs(project)}
    message = runs["allocate@sgpo-0"]["state"]["message"]
    assert "`winnow run --until allocate@sgpo-0`" in message
    assert "this is allocate@sgpo-0, live" in message.partition("Its last lines:")[2]
    assert runs["allocate@winnow-0"]["tags"] == ["project:cpu"]
    for stage in ("train@grpo-0", "train@winnow-0"):
        (tag,) = runs[stage]["tags"]
        assert f"\n{stage} | GPUs: {tag.removeprefix('project:cuda:')}\n" in output
    devices = {"project:cpu", "project:cuda:4", "project:cuda:7"}
    assert {tag for task in runs.values() for tag in task["tags"]} == devices


def hold(project: Project, place: str) -> Path:
    """Lock an output as a DVC that reads it does, and return the file of DVC's locks. The process
    of the lock is alive, but no dvc: pids are reused."""
    notes = project.root / ".dvc" / "tmp" / "rwlock"
    holder = {"pid": os.getpid(), "cmd": "/bin/dvc repro profile"}
    notes.write_text(json.dumps({"read": {str(project.root / place): [holder]}}))
    return notes


def test_incomplete_lock_of_dvc_is_named(project: Project) -> None:
    """A dvc was killed while it wrote its locks."""
    notes = project.root / ".dvc" / "tmp" / "rwlock"
    notes.write_text('{"write": {"/data/ru')
    project.edit("params.yaml", r"^  passes: 4", "  passes: 5")
    output = project.flow("grpo", expect=1)
    assert f"if no dvc runs here, remove '{notes}'" in output
    assert "Traceback" not in output
