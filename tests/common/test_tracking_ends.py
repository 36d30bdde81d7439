"""The status of failed, interrupted and killed runs, and the end of their pipeline."""

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest

from flows.pipeline import commands, roots, summary
from tasks.common import tracking
from tasks.common.artifacts import Layout
from tasks.common.files import digest_file, write_json
from tasks.common.tracking import results, track
from tasks.common.tracking.pipelines import is_alive, process_tags, this_host
from tasks.common.tracking.runs import TrackedRun
from tests.common.record import LOCAL, runs_of


def test_failed_stage_is_failed_and_its_error_propagates(layout: Layout) -> None:
    with pytest.raises(ValueError, match="no prompts"), track(LOCAL, layout, "train", "grpo", 0):
        raise ValueError("no prompts in \udce9")  # the name of a file, in Latin-1
    runs = runs_of(layout)
    assert {run.info.status for run in runs.values()} == {"FAILED"}
    assert runs["train grpo/0"].data.tags["error"] == "ValueError: no prompts in \\udce9"


def test_interrupted_stage_is_killed(layout: Layout) -> None:
    with pytest.raises(KeyboardInterrupt), track(LOCAL, layout, "profile", None, None):
        raise KeyboardInterrupt
    assert runs_of(layout)["profile"].info.status == "KILLED"


def test_flow_opens_and_closes_its_pipeline(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    metrics = layout.baseline / "metrics.json"
    with track(LOCAL, layout, "baseline", None, None):
        write_json(metrics, {})
    made_by = runs_of(layout)["baseline"].info.run_id

    monkeypatch.setattr(commands, "ROOT", project := layout.root.parent)
    (project / "params.yaml").write_text("tracking: {uri: 'sqlite:///data/tracking/mlflow.db'}")
    monkeypatch.chdir(layout.root)  # the address is relative to the project
    outcomes = {"baseline": "Cached", "policy": "Cached", "profile": "Ran"}
    stages: Any = SimpleNamespace(root=roots.Root(), outcomes=outcomes)
    with summary.recorded(stages):
        pipeline = os.environ[tracking.PIPELINE_VARIABLE]
        with track(LOCAL, layout, "profile", None, None):
            pass
        assert runs_of(layout)[f"flow {pipeline}"].info.status == "RUNNING"
    parent = runs_of(layout)[f"flow {pipeline}"]
    assert parent.info.status == "FINISHED"
    assert parent.data.tags["digest.cached.baseline/metrics.json"] == digest_file(metrics)
    assert parent.data.tags["run.cached.baseline/metrics.json"] == made_by


def test_pipeline_without_stages_creates_no_database(bare: Layout) -> None:
    tracking.end_pipeline(LOCAL, bare, tracking.start_pipeline())
    assert not (bare.tracking / "mlflow.db").exists()


def launched(*launcher: str) -> list[str]:
    """Return kind and id of the pipelines of the stages that a command starts in a new session."""
    stage = (
        "from tasks.common.tracking import pipelines\n"
        "p = pipelines.current_pipeline(); print(p['kind'], p['id'])"
    )
    command = [*launcher, sys.executable, "-c", stage]
    options: Any = {"capture_output": True, "text": True, "check": True, "start_new_session": True}
    return str(subprocess.run(command, **options).stdout).splitlines()


def test_stages_of_one_dvc_process_share_a_pipeline(tmp_path: Path) -> None:
    dvc = tmp_path / "dvc"
    dvc.write_text(
        "import subprocess, sys\nfor _ in range(2):\n    subprocess.run(sys.argv[1:], check=True)\n"
    )
    first, second = (launched(sys.executable, str(dvc)) for _ in range(2))
    assert first[0] == first[1]
    assert first[0].startswith("dvc ")
    assert first[0] != second[0]


def test_cell_of_a_killed_stage_is_closed_with_its_pipeline(
    layout: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process of the cell's run is the flow, which continues."""
    pipeline = tracking.start_pipeline()
    monkeypatch.setenv(tracking.PIPELINE_VARIABLE, pipeline)
    script = (
        "from pathlib import Path; from tasks.common import tracking, artifacts; import os, sys\n"
        "with tracking.track(tracking.Tracking(), artifacts.Layout(Path(sys.argv[1])), 'train', "
        "'grpo', 0):\n    os.kill(os.getpid(), 9)\n"
    )
    subprocess.run([sys.executable, "-c", script, str(layout.root)], check=False)
    assert runs_of(layout)["grpo/0"].info.status == "RUNNING"
    tracking.end_pipeline(LOCAL, layout, pipeline, "FAILED")
    assert {run.info.status for run in runs_of(layout).values()} == {"FAILED", "KILLED"}
    assert runs_of(layout)["grpo/0"].info.status == "FAILED"


def test_cell_of_a_killed_report_is_closed(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    def kill(*arguments: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(results, "write_settings", kill)
    monkeypatch.setattr(results, "process_tags", lambda _: {"host": this_host(), "process": "1 1"})
    client = tracking.connect(tracking.address(LOCAL, layout))
    event = {
        "kind": "cell",
        "recipe": "grpo",
        "seed": 0,
        "result": "r",
        "points": [],
        "datasets": [],
    }
    with track(LOCAL, layout, "report", None, None):
        experiment = client.get_experiment_by_name("winnow").experiment_id
        parent = runs_of(layout)["report"].data.tags["mlflow.parentRunId"]
        run = TrackedRun(client, experiment, runs_of(layout)["report"].info.run_id, parent)
        with pytest.raises(KeyboardInterrupt):
            results.write_cell(run, event)
    assert runs_of(layout)["grpo/0"].info.status == "RUNNING"
    with track(LOCAL, layout, "report", None, None):
        pass
    assert runs_of(layout)["grpo/0"].info.status == "KILLED"


def test_zombie_is_not_alive() -> None:
    child = subprocess.Popen([sys.executable, "-c", "pass"])
    tags = process_tags(psutil.Process(child.pid))
    while psutil.Process(child.pid).status() != psutil.STATUS_ZOMBIE:
        time.sleep(0.01)
    assert not is_alive(tags)
    child.wait()
    assert is_alive(process_tags(psutil.Process()))
