"""The record: against a real sqlite database, a real MLflow server that dies in mid-stage, and no
server at all."""

import json
import logging
import os
import re
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import psutil
import pytest

from tasks.common import tracking
from tasks.common.artifacts import Layout
from tasks.common.files import digest_file
from tasks.common.processes.ports import free_port
from tasks.common.tracking import Tracker, Tracking, database, results, runs, track
from tasks.common.tracking.journal import flatten, line_of, read_events, shorten
from tasks.common.tracking.pipelines import current_pipeline, is_alive, process_tags, this_host
from tasks.common.tracking.runs import TrackedRun
from tests.full import largest_file
from tests.patience import PATIENCE
from tests.stages import give_record

ROOT = Path(__file__).resolve().parents[2]
LOCAL = Tracking(uri=None, experiment="winnow", max_weights_gb=0.0, also=[])


@pytest.fixture
def bare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Layout:
    """A data root without a record."""
    monkeypatch.delenv(tracking.PIPELINE_VARIABLE, raising=False)
    return Layout(tmp_path / "data")


@pytest.fixture
def layout(bare: Layout) -> Layout:
    """A data root with an empty record."""
    give_record(bare.root)
    return bare


def runs_of(layout: Layout, uri: str | None = None) -> dict[str, Any]:
    """Every run by its name."""
    client = tracking.connect(uri or tracking.address(LOCAL, layout))
    experiment = client.get_experiment_by_name("winnow").experiment_id
    return {run.info.run_name: run for run in client.search_runs([experiment])}


def children_of(runs: dict[str, Any]) -> dict[str, Any]:
    return {name: run for name, run in runs.items() if run.data.tags["kind"] == "stage"}


def test_bare_stages_share_a_parent_and_are_named_by_their_coordinates(layout: Layout) -> None:
    with track(LOCAL, layout, "profile", None, None):
        pass
    with track(LOCAL, layout, "train", "sgpo", 0):
        pass
    runs = runs_of(layout)
    children = children_of(runs)
    (parent,) = [run for run in runs.values() if run.data.tags["kind"] == "pipeline"]
    cell = runs["sgpo/0"]
    assert len(runs) == 4
    above = {name: run.data.tags.get("mlflow.parentRunId") for name, run in runs.items()}
    assert above.pop(parent.info.run_name) is None
    assert above == {
        "profile": parent.info.run_id,
        "sgpo/0": parent.info.run_id,
        "train sgpo/0": cell.info.run_id,
    }
    assert {run.info.status for run in runs.values()} == {"FINISHED"}
    tags = children["train sgpo/0"].data.tags
    assert (tags["stage"], tags["recipe"], tags["seed"]) == ("train", "sgpo", "0")
    assert len(tags["mlflow.source.git.commit"]) == 40


def test_runs_of_a_later_round_share_the_record_and_say_which_they_are_of(layout: Layout) -> None:
    shared = Tracking(tracking.address(LOCAL, layout), "winnow", 0.0, [])
    second = Layout(layout.root / "rounds" / "2")
    for where in (layout, second):
        with track(shared, where, "train", "sgpo", 0):
            pass
    runs = runs_of(layout)
    numbers = {name: run.data.tags["round"] for name, run in runs.items()}
    parents = [name for name, run in runs.items() if run.data.tags["kind"] == "pipeline"]
    assert sorted(numbers.pop(name) for name in parents) == ["1", "2"]
    assert numbers == {
        "sgpo/0": "1",
        "train sgpo/0": "1",
        "sgpo/0, round 2": "2",
        "train sgpo/0, round 2": "2",
    }


def test_the_database_and_its_artifacts_stand_under_the_data_root(bare: Layout) -> None:
    kept = bare.root / "note.txt"
    kept.parent.mkdir(parents=True)
    kept.write_text("seen")
    with track(LOCAL, bare, "report", None, None) as tracker:
        tracker.artifact(kept)
    assert (bare.tracking / "mlflow.db").exists()
    assert [path.read_text() for path in (bare.tracking / "artifacts").rglob("note.txt")] == [
        "seen"
    ]


def test_metrics_are_sent_together(layout: Layout) -> None:
    """More points than one call may hold, none lost, each at its own step."""
    with track(LOCAL, layout, "train", "grpo", 0) as tracker:
        for step in range(700):
            tracker.metrics({"loss": step / 700, "reward": 1.0}, step=step, flops=step * 1e9)
    uri = tracking.address(LOCAL, layout)
    run = runs_of(layout)["train grpo/0"]
    for name in ("loss", "by_gflops/loss"):
        history = tracking.connect(uri).get_metric_history(run.info.run_id, name)
        assert [(point.step, point.value) for point in history] == [
            (step, step / 700) for step in range(700)
        ]


def test_long_curves_are_thinned_and_keep_both_ends(layout: Layout) -> None:
    with track(LOCAL, layout, "train", "grpo", 0) as tracker:
        for step in range(5000):
            rare = {"accuracy": step / 5000} if step % 1000 == 999 else {}
            tracker.metrics({"loss": step / 5000, **rare}, step=step, flops=step * 1e9)
    uri = tracking.address(LOCAL, layout)
    run = runs_of(layout)["train grpo/0"]
    client = tracking.connect(uri)
    expected = [*range(1000), *range(1000, 2000, 2), *range(2000, 4000, 4), *range(4000, 5000, 8)]
    for name in ("loss", "by_gflops/loss"):
        history = client.get_metric_history(run.info.run_id, name)
        assert [point.step for point in history] == [*expected, 4999]
        assert all(point.value == point.step / 5000 for point in history)
    rare_points = client.get_metric_history(run.info.run_id, "accuracy")
    assert [point.step for point in rare_points] == [999, 1999, 2999, 3999, 4999]


def test_metrics_are_curves_over_steps_and_over_gflops(layout: Layout) -> None:
    with track(LOCAL, layout, "train", "grpo", 1) as tracker:
        tracker.metrics({"accuracy": 0.25, "nothing": None}, step=0, flops=0.0)
        tracker.metrics({"accuracy": 0.5}, step=7, flops=2.4e19)
    run = runs_of(layout)["train grpo/1"]
    client = tracking.connect(tracking.address(LOCAL, layout))
    by_step = client.get_metric_history(run.info.run_id, "accuracy")
    by_gflops = client.get_metric_history(run.info.run_id, "by_gflops/accuracy")
    assert [(m.step, m.value) for m in by_step] == [(0, 0.25), (7, 0.5)]
    assert [(m.step, m.value) for m in by_gflops] == [(0, 0.25), (24_000_000_000, 0.5)]
    assert "nothing" not in run.data.metrics


def test_parameters_are_flattened_and_long_values_cut_with_a_note(layout: Layout) -> None:
    many = {f"key{index}": index for index in range(250)}
    with track(LOCAL, layout, "train", "grpo", 0) as tracker:
        tracker.params(
            {
                "loss": {"clip": {"low": 0.2}},
                "buckets": [2, 4],
                "text": "x" * 7000,
                "empty": {},
                **many,
            }
        )
    params = runs_of(layout)["train grpo/0"].data.params
    assert params["loss.clip.low"] == "0.2"
    assert params["buckets"] == "[2, 4]"
    assert params["empty"] == "{}"
    assert params["text"].endswith("... (cut, 7000 characters)")
    assert len(params["text"]) == 6000
    assert params["key249"] == "249"


def test_flatten_and_shorten() -> None:
    assert dict(flatten({"a": {"b": None}, "c": True})) == {"a.b": "null", "c": "true"}
    assert shorten("abc", 3) == "abc"


def test_benchmarks_stand_in_the_run_of_the_cell_that_was_trained(layout: Layout) -> None:
    """Beside the other results of that policy, and of no other policy."""
    curve = layout.train("grpo", 0) / "curve.parquet"
    for content in (b"first", b"second"):
        curve.parent.mkdir(parents=True, exist_ok=True)
        curve.write_bytes(content)
        with track(LOCAL, layout, "train", "grpo", 0):
            pass
    curve.write_bytes(b"first")
    with track(LOCAL, layout, "eval", None, None) as tracker:
        tracker.benchmark("grpo", 0, curve, {"eval/gsm8k/exact_match": 0.625})
    with track(LOCAL, layout, "eval", None, None) as tracker:
        curve.write_bytes(b"not recorded")
        tracker.benchmark("grpo", 0, curve, {"eval/gsm8k/exact_match": 0.5})
        tracker.benchmark(None, None, curve, {"eval/hellaswag/acc": 0.25})
    client = tracking.connect(tracking.address(LOCAL, layout))
    experiment = client.get_experiment_by_name("winnow").experiment_id
    runs = client.search_runs([experiment], order_by=["attributes.start_time ASC"])
    told = {run.info.run_id: run.data.metrics for run in runs}
    kinds = {kind: [r for r in runs if r.data.tags["kind"] == kind] for kind in ("cell", "stage")}
    trainings = [run for run in kinds["stage"] if run.info.run_name == "train grpo/0"]
    parent = trainings[0].data.tags["mlflow.parentRunId"]
    assert told[parent] == {"eval/gsm8k/exact_match": 0.625}
    evaluations = [run.data.metrics for run in kinds["stage"] if run.info.run_name == "eval"]
    assert evaluations == [
        {"eval/gsm8k/exact_match": 0.625},
        {"eval/gsm8k/exact_match": 0.5, "eval/hellaswag/acc": 0.25},
    ]
    assert sum(bool(run.data.metrics) for run in kinds["cell"]) == 1


def test_an_input_is_linked_to_the_run_that_made_it(layout: Layout) -> None:
    profile = layout.profile / "profile.parquet"
    with track(LOCAL, layout, "profile", None, None):
        profile.parent.mkdir(parents=True)
        profile.write_bytes(b"one")
    made_by = runs_of(layout)["profile"].info.run_id
    with track(LOCAL, layout, "allocate", "sgpo", None) as tracker:
        tracker.dataset("profile", profile, digest_file(profile), "allocation")
        tracker.dataset("elsewhere", Path("/elsewhere/prompts.parquet"), "0" * 16, "training")
    run = runs_of(layout)["allocate sgpo"]
    assert run.data.tags["digest.input.profile/profile.parquet"] == digest_file(profile)
    assert run.data.tags["run.input.profile/profile.parquet"] == made_by
    assert "run.input./elsewhere/prompts.parquet" not in run.data.tags
    datasets = {entry.dataset.name: entry for entry in run.inputs.dataset_inputs}
    assert datasets["profile"].dataset.digest == digest_file(profile)
    assert [tag.value for tag in datasets["profile"].tags] == ["allocation"]


def test_a_failed_stage_is_failed_and_its_error_goes_on(layout: Layout) -> None:
    def fail() -> None:
        with track(LOCAL, layout, "train", "grpo", 0):
            raise ValueError("no prompts")

    with pytest.raises(ValueError, match="no prompts"):
        fail()
    runs = runs_of(layout)
    assert {run.info.status for run in runs.values()} == {"FAILED"}
    assert runs["train grpo/0"].data.tags["error"] == "ValueError: no prompts"


def test_an_interrupted_stage_is_killed(layout: Layout) -> None:
    def interrupt() -> None:
        with track(LOCAL, layout, "profile", None, None):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupt()
    assert runs_of(layout)["profile"].info.status == "KILLED"


def test_a_flow_opens_and_closes_its_pipeline(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics = layout.baseline / "metrics.json"
    with track(LOCAL, layout, "baseline", None, None):
        metrics.parent.mkdir(parents=True)
        metrics.write_text("{}")
    made_by = runs_of(layout)["baseline"].info.run_id

    pipeline = tracking.start_pipeline()
    monkeypatch.setenv(tracking.PIPELINE_VARIABLE, pipeline)
    with track(LOCAL, layout, "profile", None, None):
        pass
    assert runs_of(layout)[f"flow {pipeline}"].info.status == "RUNNING"
    tracking.end_pipeline(
        LOCAL,
        layout,
        pipeline,
        "FINISHED",
        cached=[("baseline", None, None), ("policy", None, None)],
    )
    parent = runs_of(layout)[f"flow {pipeline}"]
    assert parent.info.status == "FINISHED"
    assert parent.data.tags["digest.cached.baseline/metrics.json"] == digest_file(metrics)
    assert parent.data.tags["run.cached.baseline/metrics.json"] == made_by


def test_a_pipeline_in_which_nothing_ran_leaves_no_trace(bare: Layout) -> None:
    pipeline = tracking.start_pipeline()
    tracking.end_pipeline(LOCAL, bare, pipeline)
    assert not (bare.tracking / "mlflow.db").exists()


def test_another_launcher_is_another_pipeline() -> None:
    first = current_pipeline()
    assert current_pipeline() == first
    script = (
        "from tasks.common.tracking import pipelines; print(pipelines.current_pipeline()['id'])"
    )
    command = [sys.executable, "-c", script]
    done = subprocess.run(
        command, capture_output=True, text=True, check=True, start_new_session=True
    )
    assert done.stdout.strip() != first["id"]


def test_stages_of_one_dvc_process_share_a_pipeline(tmp_path: Path) -> None:
    stage = (
        "from tasks.common.tracking import pipelines\n"
        "p = pipelines.current_pipeline(); print(p['kind'], p['id'])"
    )
    dvc = tmp_path / "dvc"
    dvc.write_text(
        "import subprocess, sys\nfor _ in range(2):\n    subprocess.run(sys.argv[1:], check=True)\n"
    )
    command = [sys.executable, str(dvc), sys.executable, "-c", stage]
    first = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\n")
    second = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\n")
    assert first[0] == first[1]
    assert first[0].startswith("dvc ")
    assert first[0] != second[0]


def begin_and_kill(layout: Layout) -> None:
    """The record of a training that is killed."""
    script = (
        "from pathlib import Path; from tasks.common import tracking, artifacts; import os, sys\n"
        "with tracking.track(tracking.Tracking(None, 'winnow', 0.0, []), "
        "artifacts.Layout(Path(sys.argv[1])), 'train', "
        "'grpo', 0):\n    os.kill(os.getpid(), 9)\n"
    )
    subprocess.run([sys.executable, "-c", script, str(layout.root)], check=False)


def test_a_run_whose_process_is_gone_is_marked_killed(layout: Layout) -> None:
    begin_and_kill(layout)
    assert runs_of(layout)["train grpo/0"].info.status == "RUNNING"
    with track(LOCAL, layout, "profile", None, None):
        pass
    assert runs_of(layout)["train grpo/0"].info.status == "KILLED"


def test_a_cell_whose_stage_was_killed_is_closed_with_its_pipeline(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The flow lives on, and its process is the one by which the cell is known."""
    pipeline = tracking.start_pipeline()
    monkeypatch.setenv(tracking.PIPELINE_VARIABLE, pipeline)
    begin_and_kill(layout)
    assert runs_of(layout)["grpo/0"].info.status == "RUNNING"
    tracking.end_pipeline(LOCAL, layout, pipeline, "FAILED")
    assert {run.info.status for run in runs_of(layout).values()} == {"FAILED", "KILLED"}
    assert runs_of(layout)["grpo/0"].info.status == "FAILED"


def test_a_cell_of_a_report_that_was_killed_is_closed(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        pass

    def kill(*arguments: Any) -> None:
        raise Killed

    monkeypatch.setattr(results, "write_settings", kill)
    monkeypatch.setattr(results, "process_tags", lambda _: {"host": this_host(), "process": "1 1"})
    client = tracking.connect(tracking.address(LOCAL, layout))
    event = {"kind": "cell", "recipe": "grpo", "seed": 0, "result": "r", "points": []}
    with track(LOCAL, layout, "report", None, None):
        experiment = client.get_experiment_by_name("winnow").experiment_id
        parent = runs_of(layout)["report"].data.tags["mlflow.parentRunId"]
        run = TrackedRun(client, experiment, runs_of(layout)["report"].info.run_id, parent)
        with pytest.raises(Killed):
            results.write_cell(run, event)
    assert runs_of(layout)["grpo/0"].info.status == "RUNNING"
    with track(LOCAL, layout, "report", None, None):
        pass
    assert runs_of(layout)["grpo/0"].info.status == "KILLED"


def test_a_zombie_is_not_alive() -> None:
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    tags = process_tags(psutil.Process(child.pid))
    while psutil.Process(child.pid).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    assert not is_alive(tags)
    child.wait()
    assert is_alive(process_tags(psutil.Process()))


def trained(layout: Layout, recipe: str, accuracy: float, weights: bool = False) -> Path:
    """Record a training that wrote a curve and a policy."""
    folder = layout.train(recipe, 0)
    with track(
        Tracking(None, "winnow", 1.0 if weights else 0.0, []), layout, "train", recipe, 0
    ) as tracker:
        (folder / "policy").mkdir(parents=True)
        (folder / "policy" / "model.safetensors").write_text(recipe)
        (folder / "policy" / "config.json").write_text('{"architectures": ["Qwen3ForCausalLM"]}')
        (folder / "curve.parquet").write_text(f"{accuracy}")
        tracker.model(
            f"{recipe}/0", folder / "policy", digest_file(folder / "policy" / "model.safetensors")
        )
    return folder / "curve.parquet"


def test_the_champion_is_an_alias_and_weights_are_uploaded_only_on_demand(layout: Layout) -> None:
    curve = trained(layout, "grpo", 0.5)
    assert not list((layout.tracking).rglob("model.safetensors"))
    better = trained(layout, "sgpo", 0.6, weights=True)
    assert len(list((layout.tracking).rglob("model.safetensors"))) == 1
    client = tracking.connect(tracking.address(LOCAL, layout))
    for evidence, recipe in ((curve, "grpo"), (better, "sgpo"), (better, "sgpo"), (curve, "grpo")):
        with track(LOCAL, layout, "report", None, None) as tracker:
            tracker.champion(evidence, "it was better")
        version = client.get_model_version_by_alias("winnow", "champion")
        assert version.tags["digest"] == digest_file(
            layout.train(recipe, 0) / "policy" / "model.safetensors"
        )
    assert len(client.search_model_versions("name = 'winnow'")) == 2
    shared = Tracking(tracking.address(LOCAL, layout), "winnow", 0.0, [])
    second = Layout(layout.root / "rounds" / "2")
    with track(shared, second, "report", None, None) as tracker:
        tracker.champion(None, "none beat the initial policy")
    assert "champion" in client.get_registered_model("winnow").aliases  # the first round's stays
    with track(LOCAL, layout, "report", None, None) as tracker:
        tracker.champion(None, "none beat the initial policy")
    assert client.get_registered_model("winnow").aliases == {}


def test_a_policy_that_cannot_be_uploaded_costs_its_record_nothing_else(
    layout: Layout, caplog: pytest.LogCaptureFixture
) -> None:
    folder = layout.train("grpo", 0) / "policy"
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_text("weights without a config")
    with track(Tracking(None, "winnow", 1.0, []), layout, "train", "grpo", 0) as tracker:
        tracker.model("grpo/0", folder, "abc")
        tracker.metrics({"loss": 0.5})
    assert "the weights of grpo/0 are not kept" in caplog.text
    assert runs_of(layout)["train grpo/0"].data.metrics["loss"] == 0.5
    assert not (layout.tracking / "pending").exists()


@pytest.mark.slow
def test_mlflow_loads_the_champion_and_the_candidate_and_they_generate(layout: Layout) -> None:
    """By the aliases, from the uploaded files alone."""
    folder = layout.train("sgpo", 0)
    folder.mkdir(parents=True)
    shutil.copytree(ROOT / "data" / "policy", folder / "policy")
    (folder / "curve.parquet").write_text("0.6")
    with track(Tracking(None, "winnow", 1.0, []), layout, "train", "sgpo", 0) as tracker:
        tracker.model("sgpo/0", folder / "policy", "abc")
    with track(LOCAL, layout, "report", None, None) as tracker:
        tracker.champion(folder / "curve.parquet", "it was better", folder / "curve.parquet")
    shutil.rmtree(folder)
    script = (
        "import sys, mlflow, mlflow.transformers\n"
        "mlflow.set_tracking_uri(sys.argv[1]); mlflow.set_registry_uri(sys.argv[1])\n"
        "for alias in ('candidate', 'champion'):\n"
        "    loaded = mlflow.transformers.load_model(f'models:/winnow@{alias}')\n"
        "    print(loaded('4 + 3 =', max_new_tokens=8, return_full_text=False))\n"
    )
    command = [sys.executable, "-c", script, tracking.address(LOCAL, layout)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("generated_text") == 2


def test_what_mlflow_refuses_is_said_and_the_rest_goes_on(
    layout: Layout, caplog: pytest.LogCaptureFixture
) -> None:
    with track(LOCAL, layout, "train", "grpo", 0) as tracker:
        tracker.params({"rate": 1})
        tracker.params({"rate": 2})
        tracker.metrics({"loss": 0.5}, step=1)
        tracker.flush()
        tracker.artifact(layout.root / "missing.txt")
    assert runs_of(layout)["train grpo/0"].data.metrics == {"loss": 0.5}
    assert "MLflow does not take this params" in caplog.text
    assert "missing.txt does not exist" in caplog.text
    assert not (layout.tracking / "pending").exists()


def test_a_tracker_without_a_journal_records_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tracker = Tracker()
    tracker.metrics({"loss": 1.0}, step=1, flops=1.0)
    tracker.flush()
    assert list(tmp_path.iterdir()) == []


def pending_files(layout: Layout, suffix: str = "jsonl") -> list[Path]:
    return sorted((layout.tracking / "pending").glob(f"*.{suffix}"))


def test_a_server_that_is_not_there_delays_a_stage_by_seconds(
    layout: Layout, caplog: pytest.LogCaptureFixture
) -> None:
    settings = Tracking(f"http://127.0.0.1:{free_port()}", "winnow", 0.0, [])
    started = time.monotonic()
    with track(settings, layout, "train", "grpo", 0) as tracker:
        tracker.params({"a": 1})
        tracker.metrics({"loss": 0.5}, step=3, flops=5e9)
        tracker.flush()
        before = time.monotonic()
        tracker.metrics({"loss": 0.4}, step=4)
        tracker.flush()
        again = time.monotonic() - before
    assert again < (before - started) / 2  # it is not asked again
    assert time.monotonic() - started < 60
    warnings = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert len([record for record in warnings if "tracking at" in record.message]) == 1
    assert f"push {pending_files(layout)[0]} {settings.uri}" in caplog.text
    kinds = [json.loads(line)["kind"] for line in pending_files(layout)[0].read_text().splitlines()]
    assert kinds == ["start", "params", "metrics", "metrics", "end"]


class Dripping(BaseHTTPRequestHandler):
    """A server whose every answer is a byte now and then."""

    given_up = threading.Event()

    def drip(self) -> None:
        with suppress(OSError):
            self.wfile.write(b"HTTP/1.1 200 OK\r\nX-Slow: ")
            for _ in range(60):
                self.wfile.write(b".")
                time.sleep(0.5)
        self.given_up.set()

    do_GET = do_POST = drip


@pytest.fixture
def dripping() -> Iterator[str]:
    Dripping.given_up.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), Dripping) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_a_server_that_drips_its_answers_is_left_after_a_limit(
    layout: Layout, dripping: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """MLflow waits for the next byte, and never in vain."""
    monkeypatch.setattr(runs, "CALL_SECONDS", 2.0)
    with track(Tracking(dripping, "winnow", 0.0, []), layout, "train", "grpo", 0) as tracker:
        tracker.metrics({"loss": 0.5}, step=3)
    assert not Dripping.given_up.is_set()  # the stage has ended, the first answer has not
    assert "did not answer in full within 2 s" in caplog.text
    (pending,) = pending_files(layout)
    assert [event["kind"] for event in read_events(pending)] == ["start", "metrics", "end"]
    tracking.end_pipeline(Tracking(dripping, "winnow", 0.0, []), layout, "p")
    assert "stays open: the tracking server did not answer in full" in caplog.text
    with pytest.raises(TimeoutError, match="did not answer in full"):
        tracking.replay(pending, dripping)
    assert pending.exists()


def test_a_pending_file_is_replayed_with_its_times(layout: Layout) -> None:
    settings = Tracking(f"http://127.0.0.1:{free_port()}", "winnow", 0.0, [])
    with track(settings, layout, "train", "grpo", 0) as tracker:
        tracker.metrics({"loss": 0.5}, step=3)
    (pending,) = pending_files(layout)
    events = [json.loads(line) for line in pending.read_text().splitlines()]
    uri = tracking.address(LOCAL, layout)
    command = [sys.executable, "-m", "flows", "push", str(pending.resolve()), uri]
    subprocess.run(command, check=True, capture_output=True)
    runs = runs_of(layout)
    run = runs["train grpo/0"]
    history = tracking.connect(uri).get_metric_history(run.info.run_id, "loss")
    assert [(m.value, m.step, m.timestamp) for m in history] == [
        (0.5, 3, events[1]["points"][0]["time"])
    ]
    assert (run.info.start_time, run.info.end_time) == (events[0]["time"], events[2]["time"])
    assert {run.info.status for run in runs.values()} == {"FINISHED"}
    assert pending_files(layout) == []
    assert len(pending_files(layout, "replayed")) == 1


def test_a_file_that_is_still_written_is_not_replayed_and_a_broken_off_one_is_killed(
    layout: Layout,
) -> None:
    settings = Tracking(f"http://127.0.0.1:{free_port()}", "winnow", 0.0, [])
    with track(settings, layout, "profile", None, None):
        (pending,) = pending_files(layout)
        with pytest.raises(BlockingIOError, match="still being written"):
            tracking.replay(pending, tracking.address(LOCAL, layout))
    start = read_events(pending)[0]
    start["tags"]["process"] = "999999999 0"
    pending.write_text(line_of(start))
    tracking.replay(pending, tracking.address(LOCAL, layout))
    assert runs_of(layout)["profile"].info.status == "KILLED"


def test_a_database_that_cannot_be_opened_stops_nothing(
    bare: Layout, caplog: pytest.LogCaptureFixture
) -> None:
    (bare.tracking / "mlflow.db").mkdir(parents=True)
    with track(LOCAL, bare, "profile", None, None) as tracker:
        tracker.metrics({"pass_rate": 0.5})
    assert "tracking at" in caplog.text
    assert len(pending_files(bare)) == 1


def damaged(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:5000])


@pytest.mark.slow
def test_a_damaged_database_is_set_aside_and_the_record_goes_on(
    layout: Layout, caplog: pytest.LogCaptureFixture
) -> None:
    path = layout.tracking / "mlflow.db"
    damaged(path)
    spoiled = path.read_bytes()
    with track(LOCAL, layout, "profile", None, None) as tracker:
        tracker.metrics({"pass_rate": 0.5})
    assert runs_of(layout)["profile"].data.metrics["pass_rate"] == 0.5
    assert [old.read_bytes() for old in layout.tracking.glob("mlflow.db.before-*")] == [spoiled]
    assert "an empty one replaces it" in caplog.text
    assert ".recover | sqlite3" in caplog.text
    assert pending_files(layout) == []


@pytest.mark.slow
def test_a_database_that_another_process_has_locked_is_left_in_place(layout: Layout) -> None:
    path = layout.tracking / "mlflow.db"
    inode = path.stat().st_ino
    with closing(sqlite3.connect(path, isolation_level=None)) as lock:
        lock.execute("BEGIN EXCLUSIVE")
        assert not database.replace(path)
        lock.execute("ROLLBACK")
    assert path.stat().st_ino == inode
    assert [file.name for file in layout.tracking.glob("*mlflow.db*")] == ["mlflow.db"]


def test_a_database_is_made_whole_or_not_at_all(bare: Layout) -> None:
    """Killed at any file operation on the way, there is none."""
    path = bare.tracking / "mlflow.db"
    bare.tracking.mkdir(parents=True)
    path.with_name(".mlflow.db.1-2").write_bytes(b"half")
    seen: list[bool] = []
    real = os.replace

    def replace(source: Any, target: Any) -> None:
        seen.append(path.exists())
        real(source, target)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(os, "replace", replace)
        database.make(path)
    assert seen == [False]
    assert [file.name for file in bare.tracking.iterdir()] == ["mlflow.db"]
    assert not database.replace(path)


def test_what_waits_is_replayed_by_the_next_stage(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(tracking, "open_run", away)
        with track(LOCAL, layout, "profile", None, None) as tracker:
            tracker.metrics({"pass_rate": 0.5})
    (pending,) = pending_files(layout)
    with pending.open("a") as file:
        file.write('{"kind": "met')  # cut short by a kill
    pending.with_name("a-damaged.jsonl").write_text("no JSON\n")
    pending.with_name("an-empty.jsonl").touch()
    with track(LOCAL, layout, "baseline", None, None):
        pass
    assert runs_of(layout)["profile"].data.metrics["pass_rate"] == 0.5
    assert [file.name for file in pending_files(layout)] == ["a-damaged.jsonl", "an-empty.jsonl"]


def test_every_flipped_bit_of_what_waits_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "train-1.jsonl"
    events = [{"kind": "metrics", "values": {"loss": n / 3}, "digest": "5d41"} for n in range(3)]
    path.write_text("".join(map(line_of, events)))
    assert read_events(path) == events
    content, said = path.read_bytes(), set()
    for place in range(8 * len(content)):
        damaged = bytearray(content)
        damaged[place // 8] ^= 1 << place % 8
        path.write_bytes(damaged)
        try:
            # of a damaged last line feed, as of a line that a kill cut short, the line is left out
            assert read_events(path) in (events, events[:2])
        except ValueError as error:
            said.add(re.sub(r" \(.*\)", "", str(error)).removeprefix(f"{tmp_path}/"))
    remedy = "delete that line and replay the others, or delete the file"
    assert {line for line in said if "line 2" in line} == {
        f"train-1.jsonl, line 2 is not what was written: {remedy}"
    }


def away(*_: Any) -> Any:
    raise ConnectionError("the server is away")


def test_no_place_to_write_at_all_is_said_once(
    bare: Layout, caplog: pytest.LogCaptureFixture
) -> None:
    bare.root.mkdir()
    bare.tracking.write_text("a file where the folder should be")
    with track(LOCAL, bare, "profile", None, None) as tracker:
        tracker.metrics({"pass_rate": 0.5})
    assert caplog.text.count("nothing is recorded") == 1


def test_half_a_line_is_taken_back_and_what_is_lost_is_said_once(
    layout: Layout, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that fills up while the record is written to a file: what is there can be replayed."""
    monkeypatch.setattr(tracking, "open_run", away)
    with track(LOCAL, layout, "profile", None, None) as tracker:
        (pending,) = pending_files(layout)
        with largest_file(pending.stat().st_size + 200):
            tracker.tags({"reason": "short"})
            tracker.tags({"reason": "long" * 200})
            tracker.tags({"reason": "longer" * 200})
    assert caplog.text.count("a part is not recorded") == 1
    monkeypatch.undo()
    client = tracking.connect(uri := tracking.address(LOCAL, layout))
    run = client.get_run(tracking.replay(pending, uri))
    assert (run.data.tags["reason"], run.info.status) == ("short", "FINISHED")


@pytest.mark.slow
def test_a_locked_database_is_waited_for_and_then_left(layout: Layout) -> None:
    with track(LOCAL, layout, "profile", None, None) as tracker:
        lock = sqlite3.connect(layout.tracking / "mlflow.db", isolation_level=None)
        lock.execute("BEGIN EXCLUSIVE")
        started = time.monotonic()
        tracker.metrics({"pass_rate": 0.5})
        tracker.flush()
        tracker.metrics({"pass_rate": 0.6})
        tracker.flush()
        assert time.monotonic() - started < 60
        lock.execute("ROLLBACK")
        lock.close()
    (pending,) = pending_files(layout)
    tracking.replay(pending, tracking.address(LOCAL, layout))
    run = runs_of(layout)["profile"]
    assert run.info.status == "FINISHED"
    assert run.data.metrics["pass_rate"] == 0.6


@dataclass
class Server:
    """A real `mlflow server` on this machine, which can be stopped and started again on the same
    database."""

    folder: Path
    port: int
    process: subprocess.Popen[bytes] | None = None

    @property
    def uri(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        where = [
            "--backend-store-uri",
            f"sqlite:///{self.folder}/server.db",
            "--artifacts-destination",
            "artifacts",
        ]
        address = ["--host", "127.0.0.1", "--port", str(self.port), "--workers", "1"]
        environment = {
            **os.environ,
            "MLFLOW_DISABLE_TELEMETRY": "true",
            "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "mlflow", "server", *where, *address],
            cwd=self.folder,
            env=environment,
            start_new_session=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self.wait()

    def wait(self) -> None:
        deadline = time.monotonic() + PATIENCE
        while time.monotonic() < deadline:
            with suppress(OSError), urllib.request.urlopen(f"{self.uri}/health", timeout=2):
                return
            time.sleep(0.2)
        raise TimeoutError("mlflow server did not start")

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    folder = tmp_path / "server"
    folder.mkdir()
    server = Server(folder, free_port())
    server.start()
    yield server
    server.stop()


@pytest.mark.slow
def test_a_server_killed_in_mid_stage_and_the_replay_into_the_same_run(
    layout: Layout, server: Server
) -> None:
    settings = Tracking(server.uri, "winnow", 0.0, [])
    kept = layout.root / "kept" / "note.txt"
    kept.parent.mkdir(parents=True)
    kept.write_text("seen")
    with track(settings, layout, "train", "sgpo", 0) as tracker:
        tracker.params({"rate": 1})
        tracker.metrics({"loss": 0.5}, step=1)
        tracker.flush()
        server.stop()
        tracker.metrics({"loss": 0.4}, step=2)
        tracker.flush()
        tracker.artifact(kept.parent)
        tracker.model("sgpo/0", kept.parent, "abc")
        tracker.output(kept, digest_file(kept))
    server.start()
    before = runs_of(layout, server.uri)["train sgpo/0"]
    assert before.info.status == "RUNNING"
    (pending,) = pending_files(layout)
    assert tracking.replay(pending, server.uri) == before.info.run_id
    runs = runs_of(layout, server.uri)
    run = runs["train sgpo/0"]
    client = tracking.connect(server.uri)
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


def test_process_tags_name_a_process_once() -> None:
    import psutil

    assert process_tags(psutil.Process())["process"].split()[0] == str(os.getpid())
