"""Functions that write one event of the journal to an MLflow run of any kind."""

import json
import logging
from pathlib import Path

from tasks.common.tracking.journal import Event
from tasks.common.tracking.runs import DIGEST, TrackedRun, link

logger = logging.getLogger(__name__)

MAX_BATCH = 100
MAX_METRICS = 1000


def write_params(run: TrackedRun, event: Event) -> None:
    from mlflow.entities import Param

    entries = [Param(key, value) for key, value in event["values"].items()]
    for first in range(0, len(entries), MAX_BATCH):
        run.client.log_batch(run.run_id, params=entries[first : first + MAX_BATCH])


def write_metrics(run: TrackedRun, event: Event) -> None:
    from mlflow.entities import Metric

    entries = []
    for point in event["points"]:
        values, when, gflops = point["values"], point["time"], point["gflops"]
        entries += [Metric(name, value, when, point["step"]) for name, value in values.items()]
        if gflops is not None:
            entries += [
                Metric(f"by_gflops/{name}", value, when, gflops) for name, value in values.items()
            ]
    for first in range(0, len(entries), MAX_METRICS):
        run.client.log_batch(run.run_id, metrics=entries[first : first + MAX_METRICS])


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
