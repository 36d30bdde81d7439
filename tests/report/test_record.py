"""The report's record in MLflow: one run per cell and result, the experiment in the pipeline's run,
and a replay after a server was away."""

from typing import Any

import pytest
import yaml

from tasks.common import tracking
from tasks.common.artifacts import Layout
from tasks.common.checksums import read_checked, write_checked
from tasks.common.files import digest_file, read_json
from tasks.common.tracking import views
from tasks.report.results import name_of
from tests.report.conftest import run_report, write_params
from tests.stages import give_record, run_stage

SETTINGS = tracking.Tracking(None, "winnow", 0.0, [])


def report(layout: Layout) -> None:
    assert "only partly recorded" not in run_report(layout)


def client_of(layout: Layout) -> Any:
    return tracking.connect(tracking.address(SETTINGS, layout))


def found(layout: Layout, kind: str, order: str = "attributes.start_time ASC") -> list[Any]:
    client = client_of(layout)
    experiment = client.get_experiment_by_name("winnow").experiment_id
    return list(client.search_runs([experiment], f"tags.kind = '{kind}'", order_by=[order]))


def test_a_search_finds_the_cell_with_the_most_accuracy_for_its_compute(reported: Layout) -> None:
    """The pipeline's run has the experiment."""
    assert "only partly recorded" not in (reported.root.parent / "output").read_text()
    cells = found(reported, "cell", "metrics.pass_at_1_per_tflop_charged DESC")
    assert [run.info.run_name for run in cells] == ["sgpo/1", "sgpo/0", "grpo/1", "grpo/0"]
    best = cells[0]
    # 400 GFLOPs charged, 55 % reached
    assert best.data.metrics["pass_at_1_per_tflop_charged"] == pytest.approx(0.55 / 0.4)
    assert best.data.metrics["pass_at_1_low"] < 0.55 < best.data.metrics["pass_at_1_high"]
    assert best.data.metrics["flops_executed"] == pytest.approx(280e9)
    assert best.data.params["allocate.strategy"] == "sgpo"
    assert best.data.params["allocate.passes"] == "4"  # common to all recipes
    assert best.data.params["train.loss.clip_high"] == "0.28"
    assert best.data.params["engine.dtype"] == "float32"
    curves = [
        client_of(reported).get_metric_history(best.info.run_id, f"by_gflops/{name}")
        for name in ("validation_accuracy", "reward_mean")
    ]
    assert (curves[0][0].step, curves[0][-1].step) == (100, 400)  # profiling comes first
    assert {point.step for point in curves[1]} == {103}  # of the table's example
    shown = [*views.COLUMNS, *(f"metrics.`{chart.get('metricKey')}`" for chart in views.CHARTS)]
    metrics = {name.split("`")[1] for name in shown if name.startswith("metrics")} - {"None"}
    assert metrics <= {*best.data.metrics}

    (pipeline,) = found(reported, "pipeline")
    assert pipeline.data.metrics["pass_at_1/grpo"] == pytest.approx(0.52)
    assert pipeline.data.metrics["pass_at_1/initial"] == pytest.approx(0.40)
    summary = read_json(reported.report / "summary.json")
    (chosen,) = [c for c in cells if c.info.run_name == name_of(summary["candidate"])]
    for name in ("pass_at_1", "flops_executed", "flops_charged", "seconds"):
        assert pipeline.data.metrics[name] == chosen.data.metrics[name]
    experiment = client_of(reported).get_experiment(pipeline.info.experiment_id)
    notes = {one.tags["mlflow.note.content"] for one in (experiment, pipeline.data)}
    assert notes == {summary["headline"]}
    for run in (pipeline, best):
        datasets = {one.dataset.name: one.dataset.digest for one in run.inputs.dataset_inputs}
        assert datasets["test"] == digest_file(reported.prompts("test"))
    assert pipeline.data.params["experiment.seeds"] == "[0, 1]"
    assert "recipes.sgpo.allocate.strategy" in pipeline.data.params
    assert "recipes.pods.allocate.strategy" not in pipeline.data.params


def test_a_result_is_recorded_once_and_a_changed_one_again(
    copied: Layout, monkeypatch: pytest.MonkeyPatch
) -> None:
    def pipeline() -> None:
        monkeypatch.setenv(tracking.PIPELINE_VARIABLE, tracking.start_pipeline())
        report(copied)

    pipeline()
    assert len(found(copied, "pipeline")) == 2
    assert len(found(copied, "cell")) == 4
    path = copied.evaluation("sgpo", 0) / "metrics.json"
    write_checked(path, {**read_checked(path), "greedy": 0.99})
    pipeline()
    names = sorted(run.info.run_name for run in found(copied, "cell"))
    assert names == ["grpo/0", "grpo/1", "sgpo/0", "sgpo/0", "sgpo/1"]
    monkeypatch.setenv(tracking.PIPELINE_VARIABLE, tracking.start_pipeline())
    with tracking.track(SETTINGS, copied, "evaluate", "grpo", 1):
        pass  # its row in this pipeline has the result, too
    report(copied)
    rows = [run for run in found(copied, "cell") if run.info.run_name == "grpo/1"]
    assert [run.data.metrics["pass_at_1"] for run in rows] == [pytest.approx(0.54)] * 2


def test_the_champion_has_the_weights_of_the_report(layout: Layout) -> None:
    """A later training had the same curve and other weights, and DVC has restored the first."""
    card = layout.trained_card("sgpo", 1)
    for digest in ("sgpo-1", "77b0"):
        write_checked(card, {"digest": digest})
        with tracking.track(SETTINGS, layout, "train", "sgpo", 1) as tracker:
            tracker.model("sgpo/1", layout.train("sgpo", 1) / "policy", digest)
    write_checked(card, {"digest": "sgpo-1"})
    report(layout)
    version = client_of(layout).get_model_version_by_alias("winnow", "champion")
    assert version.tags["digest"] == "sgpo-1"


def test_a_report_after_a_kill_completes_the_cells(layout: Layout) -> None:
    report(layout)  # a cell belongs to the process that starts its stages, as this one does
    client = client_of(layout)
    cells = {run.info.run_name: run.info.run_id for run in found(layout, "cell")}
    client.delete_tag(cells["sgpo/0"], "cell.result")  # it is written last
    report(layout)
    again = {run.info.run_name: run for run in found(layout, "cell")}
    assert {name: run.info.run_id for name, run in again.items()} == cells
    assert "cell.result" in again["sgpo/0"].data.tags
    assert again["sgpo/0"].info.status == "FINISHED"
    assert len(client.get_metric_history(cells["sgpo/0"], "by_gflops/validation_accuracy")) == 8


def test_cells_are_replayed_after_a_server_was_away(layout: Layout) -> None:
    params = write_params(layout.root.parent, ["grpo", "sgpo"], [0, 1])
    values = yaml.safe_load(params.read_text())
    values["tracking"]["uri"] = "http://127.0.0.1:9"  # no server listens there
    params.write_text(yaml.safe_dump(values))
    assert run_stage("report", params, layout.root).returncode == 0
    (pending,) = (layout.tracking / "pending").glob("*.jsonl")
    give_record(layout.root)
    tracking.replay(pending, tracking.address(SETTINGS, layout))
    names = sorted(run.info.run_name for run in found(layout, "cell"))
    assert names == ["grpo/0", "grpo/1", "sgpo/0", "sgpo/1"]
