"""Functions that write one event of the journal to an MLflow run of any kind."""

import json
import logging
from pathlib import Path
from typing import Any

from tasks.common.tracking.journal import Event
from tasks.common.tracking.runs import DIGEST, TrackedRun, link

logger = logging.getLogger(__name__)

MAX_BATCH = 100
MAX_METRICS = 1000
BY = "by_gflops/"  # prefix of a curve over compute
CURVES = ("validation_accuracy", "reward_mean")  # in a cell's run while it trains


def write_params(run: TrackedRun, event: Event) -> None:
    from mlflow.entities import Param

    entries = [Param(key, value) for key, value in event["values"].items()]
    for first in range(0, len(entries), MAX_BATCH):
        run.client.log_batch(run.run_id, params=entries[first : first + MAX_BATCH])


def write_metrics(run: TrackedRun, event: Event) -> None:
    """Write points into the run, and those of CURVES into its cell's run. There the time of a point
    is its step: MLflow drops a point that is written again, by a resumed training or the report."""
    from mlflow.entities import Metric

    entries, live, is_cell = list[Any](), list[Any](), run.run_id == run.cell_id
    for point in event["points"]:
        for prefix, step in (("", point["step"]), (BY, point["gflops"])):
            for name, value in point["values"].items() if step is not None else ():
                if name in CURVES and run.cell_id:
                    live.append(Metric(prefix + name, value, point["step"], step))
                if name not in CURVES or not is_cell:
                    entries.append(Metric(prefix + name, value, point["time"], step))
    log_metrics(run, run.run_id, entries)
    if live:
        log_metrics(run, run.cell_id, live if is_cell else earlier_points(run, live[0].step) + live)


def log_metrics(run: TrackedRun, run_id: str | None, entries: list[Any]) -> None:
    for first in range(0, len(entries), MAX_METRICS):
        run.client.log_batch(run_id, metrics=entries[first : first + MAX_METRICS])


def earlier_points(run: TrackedRun, last: int) -> list[Any]:
    """Return the points of CURVES up to step `last` of the latest earlier training of the cell with
    the same parameters and inputs, whose checkpoint this one may have resumed; [] if the cell's run
    already has points."""
    if {*CURVES} & {*run.client.get_run(run.cell_id).data.metrics}:
        return []
    this, named = run.client.get_run(run.run_id), ("stage", "recipe", "seed")
    where = [f"attributes.start_time < {this.info.start_time}"]
    for key, value in this.data.tags.items():
        if key in named or key.startswith(f"{DIGEST}.input."):
            where.append(f"tags.`{key}` = '{value}'")
    for one in run.client.search_runs([run.experiment_id], " AND ".join(where)):
        if one.data.params == this.data.params:
            cell, keys = one.data.tags["mlflow.parentRunId"], [*CURVES, *(BY + c for c in CURVES)]
            points = (p for key in keys for p in run.client.get_metric_history(cell, key))
            return [point for point in points if point.timestamp <= last]
    return []


def write_tags(run: TrackedRun, event: Event) -> None:
    from mlflow.entities import RunTag

    entries = [RunTag(key, value) for key, value in event["values"].items()]
    for first in range(0, len(entries), MAX_BATCH):
        run.client.log_batch(run.run_id, tags=entries[first : first + MAX_BATCH])


def write_dataset(run: TrackedRun, event: Event) -> None:
    from mlflow.entities import Dataset, DatasetInput, InputTag

    key, digest = event["key"], event["digest"]
    source = json.dumps({"uri": Path(event["path"]).as_uri()})
    dataset = Dataset(event["name"], digest[:36], "local", source)
    run.client.log_inputs(
        run.run_id, [DatasetInput(dataset, [InputTag("mlflow.data.context", event["context"])])]
    )
    write_tags(run, {"values": link(run, "input", key, digest)})


def write_output(run: TrackedRun, event: Event) -> None:
    run.client.set_tag(run.run_id, f"{DIGEST}.output.{event['key']}", event["digest"])


def write_artifact(run: TrackedRun, event: Event) -> None:
    path = Path(event["path"])
    if path.is_dir():
        run.client.log_artifacts(run.run_id, str(path), path.name)
    elif path.exists():
        run.client.log_artifact(run.run_id, str(path))
    else:
        logger.warning("%s does not exist, so it is not stored with the run", path)
