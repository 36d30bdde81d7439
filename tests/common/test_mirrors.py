"""Trackers beside MLflow: the content of each run, faults that must not stop a stage, and the files
of the real trackers."""

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tasks.common import tracking
from tasks.common.checksums import read_checked
from tasks.common.layout import Layout
from tasks.common.tracking import Tracker, Tracking, mirrors
from tasks.common.tracking.journal import point
from tests.files import plant
from tests.patience import PATIENCE, wait_for

ROOT = Path(__file__).resolve().parents[2]
PARAMS = {"train": {"learning_rate": 0.001}}

# Replaces the package `wandb`: it writes its calls to a file, and hangs on request.
WANDB = """
import json, os, time
class Settings:
    def __init__(self, **settings): pass
class Part:
    def __init__(self, name): self.name = name
    def update(self, values, **options): report(self.name, values)
class Run:
    config, summary = Part("config"), Part("summary")
    def log(self, values, step): report("log", {"step": step, **values})
    def finish(self, exit_code): report("finish", exit_code)
def report(kind, value):
    with open(os.environ["CALLS"], "a") as file:
        file.write(json.dumps([kind, value]) + "\\\\n")
def init(**options):
    if os.environ.get("BEHAVIOUR") == "hang":
        time.sleep(600)
    report("init", {key: options[key] for key in ("project", "id", "name", "group", "resume")})
    return Run()
""".replace("\\\\n", "\\n")


@pytest.fixture
def layout(tmp_path: Path) -> Layout:
    return Layout(tmp_path / "data")


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Replace wandb. Return the file with the calls to the replacement, one per line."""
    plant(tmp_path, {"stand_in/wandb.py": WANDB})
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "stand_in"))
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    return tmp_path / "calls"


def lines(fake: Path) -> list[tuple[str, Any]]:
    return [tuple(json.loads(line)) for line in fake.read_text().splitlines()]


@pytest.fixture(autouse=True)
def no_mlflow(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking, "open_stage", lambda *_: lambda event: None)


def stage(
    layout: Layout, name: str, recipe: str | None = None, seed: int | None = None, also: Any = None
) -> AbstractContextManager[Tracker]:
    """Open the record of a stage with these trackers, without MLflow."""
    settings = Tracking(None, "mine", 0.0, also or ["wandb"])
    return tracking.track(settings, layout, name, recipe, seed)


def train(
    layout: Layout,
    steps: range,
    *,
    killed: bool = False,
    rate: float = 0.001,
    also: list[str] | None = None,
) -> None:
    """Record these steps of a training of grpo with seed 0."""
    curve = layout.train("grpo", 0) / "curve.parquet"
    curve.parent.mkdir(parents=True, exist_ok=True)
    curve.write_bytes(f"{rate}".encode())
    with contextlib.suppress(InterruptedError), stage(layout, "train", "grpo", 0, also) as tracker:
        tracker.params({"train": {"learning_rate": rate}})
        tracker.dataset("plan", curve, "abc", "train")
        for step in steps:
            tracker.metrics({"loss": 1 / (step + 1)}, step, flops=step * 2e9)
        if killed:
            raise InterruptedError


def report(layout: Layout, accuracy: float, also: list[str] | None = None) -> None:
    """Record the report of grpo with seed 0: two curves with two points each."""
    curve = layout.train("grpo", 0) / "curve.parquet"
    curves = [{"accuracy": [0.25, accuracy]}, {"reward": [0.5, 0.75]}]
    points = [
        point({name: values[step]}, 1_000, step, flops=step * 2e9)
        for one in curves
        for name, values in one.items()
        for step in (0, 1)
    ]
    with stage(layout, "report", also=also) as tracker:
        result = point({"pass_at_1": accuracy}, 2_000)
        tracker.cell("grpo", 0, PARAMS, [result, *points], datasets={}, outputs=[curve])


def test_run_has_parameters_and_curves_and_only_the_same_training_resumes_it(
    layout: Layout, fake: Path
) -> None:
    train(layout, range(3), killed=True)
    train(layout, range(2, 5))
    calls = lines(fake)
    train(layout, range(1), rate=0.01)
    inits = [value for kind, value in lines(fake) if kind == "init"]
    assert inits[0] == inits[1]
    assert inits[2]["id"] != inits[0]["id"]
    assert {**inits[0], "id": ""} == {
        "project": "winnow",
        "id": "",
        "name": "grpo/0",
        "group": "mine",
        "resume": "allow",
    }
    assert ("config", {"train.learning_rate": "0.001"}) in calls
    steps = [value for kind, value in calls if kind == "log"]
    assert [value["step"] for value in steps] == [0, 1, 2, 2, 3, 4]
    assert steps[3] == {"step": 2, "loss": pytest.approx(1 / 3), "gflops": 4.0}
    assert [value for kind, value in calls if kind == "finish"] == [1, 0]


def test_results_are_added_once_to_the_run_of_their_training(layout: Layout, fake: Path) -> None:
    train(layout, range(2))
    report(layout, 0.625)
    report(layout, 0.625)  # a repeated record is sent once
    calls = lines(fake)
    ids = [value["id"] for kind, value in calls if kind == "init"]
    assert ids == [ids[0]] * 2  # one per stage
    assert [value for kind, value in calls if kind == "summary"] == [{"pass_at_1": 0.625}]
    assert [value["step"] for kind, value in calls if kind == "log"] == [0, 1]  # from the training


def test_report_sends_the_curves_of_a_restored_training(layout: Layout, fake: Path) -> None:
    train(layout, range(1))
    curve = layout.train("grpo", 0) / "curve.parquet"
    curve.write_bytes(b"restored by DVC")
    report(layout, 0.625)
    calls = lines(fake)
    begin = max(n for n, (kind, _) in enumerate(calls) if kind == "init")
    assert calls[begin][1]["id"] != calls[0][1]["id"]
    assert [value for kind, value in calls[begin:] if kind != "init"] == [
        {"train.learning_rate": "0.001"},
        {"step": 0, "accuracy": 0.25, "gflops": 0.0},
        {"step": 0, "reward": 0.5, "gflops": 0.0},
        {"step": 1, "accuracy": 0.625, "gflops": 2.0},
        {"step": 1, "reward": 0.75, "gflops": 2.0},
        {"pass_at_1": 0.625},
        0,
    ]


def test_hanging_tracker_does_not_slow_a_stage(
    layout: Layout, fake: Path, monkeypatch: pytest.MonkeyPatch, caplog
) -> None:
    monkeypatch.setenv("BEHAVIOUR", "hang")
    monkeypatch.setattr(mirrors, "LAST_SECONDS", 0.2)
    monkeypatch.setattr(mirrors, "MAX_WAITING", 50)
    caplog.set_level("INFO")
    begun = time.monotonic()
    train(layout, range(2000))
    assert time.monotonic() - begun < PATIENCE / 2  # the tracker sleeps for twice as long
    assert "wandb: still writing; its process ends by itself" in caplog.text
    (tracker,) = [each for each in psutil.Process().children() if "wandb" in each.cmdline()]
    tracker.kill()


def test_tracker_that_reads_nothing_is_dropped(
    layout: Layout, fake: Path, monkeypatch: pytest.MonkeyPatch, caplog
) -> None:
    monkeypatch.setattr(mirrors, "MAX_WAITING", 20)
    monkeypatch.setattr(mirrors, "LAST_SECONDS", 0.0)
    writer = mirrors.Writer(["wandb"], layout.tracking)
    writer.start()
    assert writer.child is not None
    writer.child.send_signal(signal.SIGSTOP)
    for _ in range(40):
        writer.send({"do": "final", "values": {"x" * 100_000: 1.0}})
    assert writer.is_lost
    warning = "a part of this run is missing in wandb: their process is too slow"
    assert caplog.text.count(warning) == 1
    writer.close()
    writer.child.kill()


def test_failing_tracker_is_logged_and_the_others_continue(
    layout: Layout, fake: Path, monkeypatch: pytest.MonkeyPatch, caplog
) -> None:
    """The replacement of tensorboard cannot be imported."""
    plant(fake.parent, {"stand_in/tensorboard.py": "raise RuntimeError('broken')"})
    train(layout, range(3), also=["tensorboard", "wandb"])
    missing = "a part of this run is missing in tensorboard, wandb: their process ended with status"
    assert missing in caplog.text
    log = layout.tracking / "also" / "trackers.log"
    assert str(log) in caplog.text
    assert "RuntimeError: broken" in log.read_text()
    calls = lines(fake)
    assert [value["step"] for kind, value in calls if kind == "log"] == [0, 1, 2]
    assert calls[-1] == ("finish", 0)


def test_messages_of_a_killed_stage_are_written(layout: Layout, fake: Path) -> None:
    program = (
        "import os, signal, sys, time; from pathlib import Path\n"
        "from tasks.common import tracking\n"
        "from tasks.common.layout import Layout; from tests.common.test_mirrors import stage\n"
        "tracking.open_stage = lambda *_: lambda event: None\n"
        "with stage(Layout(Path(sys.argv[1])), 'train', 'grpo', 0) as tracker:\n"
        "    tracker.params({'a': 1})\n"
        "    tracker.metrics({'loss': 0.5}, 0)\n"
        "    tracker.flush()\n"
        "    time.sleep(0.2)\n"
        "    pipe = tracker.journal.listeners[0].__self__.writer.child.stdin\n"
        "    os.write(pipe.fileno(), b'{\"do\": ')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    path = os.pathsep.join([os.environ["PYTHONPATH"], str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-c", program, str(layout.root)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode == -signal.SIGKILL
    wait_for(lambda: fake.exists() and "finish" in fake.read_text())
    assert lines(fake)[-2:] == [("log", {"step": 0, "loss": 0.5}), ("finish", 1)]


def needs(package: str) -> pytest.MarkDecorator:
    spec = importlib.util.find_spec(package)
    is_there = spec is not None and spec.origin is not None
    return pytest.mark.skipif(not is_there, reason=f"{package} is not installed")


def run_all(layout: Layout, tracker: str) -> str:
    """Record a training that is killed at step 3 and resumed from step 2. Return the run's id."""
    train(layout, range(3), killed=True, also=[tracker])
    train(layout, range(2, 5), also=[tracker])
    report(layout, 0.625, also=[tracker])
    return str(read_checked(layout.tracking / "also" / "grpo" / "0.json")["id"])


LOSSES = [(step, pytest.approx(1 / (step + 1))) for step in range(5)]


@needs("tensorboard")
@pytest.mark.slow
def test_tensorboard_draws_one_curve(layout: Layout) -> None:
    identity = run_all(layout, "tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(
        str(layout.tracking / "tensorboard" / "mine" / "grpo" / f"0-{identity}")
    ).Reload()
    assert [(one.step, one.value) for one in events.Scalars("loss")] == LOSSES
    assert [one.value for one in events.Scalars("gflops")] == [0, 2, 4, 6, 8]
    assert [one.value for one in events.Scalars("final/pass_at_1")] == [0.625]
    (text,) = {one.tensor_proto.string_val[0] for one in events.Tensors("parameters/text_summary")}
    assert b"| train.learning_rate | 0.001 |" in text


@needs("wandb")
@pytest.mark.slow
def test_wandb_writes_offline_files_of_one_run(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WANDB_MODE", "WANDB_DIR", "WANDB_PROJECT"):
        monkeypatch.delenv(name, raising=False)
    identity = run_all(layout, "wandb")
    files = sorted((layout.tracking / "wandb").glob(f"offline-run-*/run-{identity}.wandb"))
    assert len(files) == 3  # `wandb sync` merges them
    contents = [path.read_bytes() for path in files]
    assert all(b"grpo/0" in content and b"mine" in content for content in contents)
    assert b"pass_at_1" in b"".join(contents)
