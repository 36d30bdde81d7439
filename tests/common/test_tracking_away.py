"""Pending events are replayed if the server was absent, was slow or ended during a stage."""

import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import mlflow
import pytest

from flows.serve.server import comes_up
from tasks.common import tracking
from tasks.common.artifacts import Layout
from tasks.common.files import digest_file
from tasks.common.processes.ports import free_port
from tasks.common.tracking import Tracking, runs, track
from tasks.common.tracking.journal import line_of, point, read_events
from tests.common.record import LOCAL, away, pending_files, runs_of
from tests.once import once
from tests.stages import make_record


def test_events_for_an_absent_server_are_replayed_with_their_times(
    layout: Layout, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = tracking.address(LOCAL, layout)
    monkeypatch.setattr(tracking, "open_run", away)
    with track(LOCAL, layout, "train", "grpo", 0) as tracker:
        tracker.params({"a": 1})
        tracker.metrics({"loss": 0.5}, step=3, flops=5e9)
        tracker.flush()
        tracker.metrics({"loss": 0.4}, step=4)
        tracker.flush()
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len([record for record in warnings if "tracking at" in record.message]) == 1
    (pending,) = pending_files(layout)
    assert f"push {pending} {uri}" in caplog.text
    events = [json.loads(line) for line in pending.read_text().splitlines()]
    assert [event["kind"] for event in events] == ["start", "params", "metrics", "metrics", "end"]
    command = [sys.executable, "-m", "flows", "push", str(pending.resolve()), uri]
    subprocess.run(command, check=True, capture_output=True)
    runs = runs_of(layout)
    run = runs["train grpo/0"]
    history = tracking.connect(uri).get_metric_history(run.info.run_id, "loss")
    times = [event["points"][0]["time"] for event in events[2:4]]
    assert [(m.value, m.step, m.timestamp) for m in history] == [
        (0.5, 3, times[0]),
        (0.4, 4, times[1]),
    ]
    assert (run.info.start_time, run.info.end_time) == (events[0]["time"], events[4]["time"])
    assert {run.info.status for run in runs.values()} == {"FINISHED"}
    assert pending_files(layout) == []
    assert len(pending_files(layout, "replayed")) == 1


def test_slow_server_is_abandoned_after_a_limit(
    layout: Layout, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """MLflow limits only the wait for the next byte."""
    uri, is_over = tracking.address(LOCAL, layout), threading.Event()
    with monkeypatch.context() as slow:
        slow.setattr(runs, "CALL_SECONDS", 0.2)
        slow.setattr(mlflow.MlflowClient, "get_experiment_by_name", lambda *_: is_over.wait())
        with track(LOCAL, layout, "train", "grpo", 0) as tracker:
            tracker.metrics({"loss": 0.5}, step=3)
        assert "did not respond completely within 0.2 s" in caplog.text
        (pending,) = pending_files(layout)
        assert [event["kind"] for event in read_events(pending)] == ["start", "metrics", "end"]
        tracking.end_pipeline(LOCAL, layout, "p")
        assert "remains open: the tracking server did not respond completely" in caplog.text
        with pytest.raises(TimeoutError, match="did not respond completely"):
            tracking.replay(pending, uri)
        assert pending.exists()
        is_over.set()


def test_file_of_a_running_stage_is_not_replayed(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tracking, "open_run", away)
    with track(LOCAL, layout, "profile", None, None):
        (pending,) = pending_files(layout)
        with pytest.raises(BlockingIOError, match="still being written"):
            tracking.replay(pending, tracking.address(LOCAL, layout))
    monkeypatch.undo()
    start = read_events(pending)[0]
    start["tags"] |= {"process": "999999999 0", "round": "1"}  # a tag of earlier versions
    pending.write_text(line_of(start))
    tracking.replay(pending, tracking.address(LOCAL, layout))
    assert runs_of(layout)["profile"].info.status == "KILLED"


def test_pending_file_is_replayed_by_the_next_stage(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(tracking, "open_run", away)
        with track(LOCAL, layout, "profile", None, None) as tracker:
            tracker.metrics({"pass_rate": 0.5})
            tracker._record("benchmark", points=[point({"acc": 0.25}, 0)])  # of an earlier version
    (pending,) = pending_files(layout)
    with pending.open("a") as file:
        file.write('{"kind": "met')  # truncated by a kill
    pending.with_name("a-damaged.jsonl").write_text("no JSON\n")
    pending.with_name("an-empty.jsonl").touch()
    with track(LOCAL, layout, "baseline", None, None):
        pass
    metrics = runs_of(layout)["profile"].data.metrics
    assert (metrics["pass_rate"], metrics["acc"]) == (0.5, 0.25)
    assert [file.name for file in pending_files(layout)] == ["a-damaged.jsonl", "an-empty.jsonl"]


def test_every_flipped_bit_of_a_pending_file_is_detected(tmp_path: Path) -> None:
    path = tmp_path / "train-1.jsonl"
    events = [{"kind": "metrics", "values": {"loss": n / 3}, "digest": "5d41"} for n in range(3)]
    path.write_text("".join(map(line_of, events)))
    assert read_events(path) == events
    content, messages = path.read_bytes(), set()
    for place in range(8 * len(content)):
        damaged = bytearray(content)
        damaged[place // 8] ^= 1 << place % 8
        path.write_bytes(damaged)
        try:
            # a last line without its line feed is ignored
            assert read_events(path) in (events, events[:2])
        except ValueError as error:
            messages.add(re.sub(r" \(.*\)", "", str(error)).removeprefix(f"{tmp_path}/"))
    remedy = "delete that line and replay the others, or delete the file"
    assert {line for line in messages if "line 2" in line} == {
        f"train-1.jsonl, line 2 is damaged: {remedy}"
    }


@contextmanager
def serving(folder: Path, port: int) -> Iterator[None]:
    """Run a real `mlflow server` on the database in `folder`."""
    line = [sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port)]
    line += ["--workers", "1", "--backend-store-uri", f"sqlite:///{folder}/mlflow.db"]
    process = subprocess.Popen(
        [*line, "--artifacts-destination", "artifacts"],
        cwd=folder,
        env={**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"},
        start_new_session=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        assert comes_up(process, f"http://127.0.0.1:{port}/health")
        yield
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.fixture
def running() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@pytest.mark.slow
def test_events_after_the_end_of_a_server_are_replayed_into_the_same_run(
    layout: Layout, running: ExitStack
) -> None:
    folder, port = layout.root / "server", free_port()
    shutil.copytree(once("record", make_record), folder)
    running.enter_context(serving(folder, port))
    uri = f"http://127.0.0.1:{port}"
    settings = Tracking(uri, "winnow", 0.0, [])
    kept = layout.root / "kept" / "note.txt"
    kept.parent.mkdir(parents=True)
    kept.write_text("seen")
    with track(settings, layout, "train", "sgpo", 0) as tracker:
        tracker.params({"rate": 1})
        tracker.metrics({"loss": 0.5}, step=1)
        tracker.flush()
        running.close()
        tracker.metrics({"loss": 0.4}, step=2)
        tracker.flush()
        tracker.artifact(kept.parent)
        tracker.model("sgpo/0", kept.parent, "abc")
        tracker.output(kept, digest_file(kept))
    running.enter_context(serving(folder, port))
    before = runs_of(layout, uri)["train sgpo/0"]
    assert before.info.status == "RUNNING"
    (pending,) = pending_files(layout)
    assert tracking.replay(pending, uri) == before.info.run_id
    runs = runs_of(layout, uri)
    run = runs["train sgpo/0"]
    client = tracking.connect(uri)
    assert len(runs) == 3  # the pipeline's, the cell's, the stage's
    assert {run.info.status for run in runs.values()} == {"FINISHED"}
    assert run.data.params == {"rate": "1"}
    assert [m.value for m in client.get_metric_history(run.info.run_id, "loss")] == [0.5, 0.4]
    assert [file.path for file in client.list_artifacts(run.info.run_id, "kept")] == [
        "kept/note.txt"
    ]
    assert run.data.tags["digest.output.kept"] == "abc"
    with track(settings, layout, "report", None, None) as tracker:
        tracker.champion(kept, "it was better")
    assert client.get_model_version_by_alias("winnow", "champion").tags["digest"] == "abc"
