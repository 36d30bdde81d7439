"""The record of what ran, in MLflow. The only file that imports mlflow, and only when something is
to be recorded.

A parent run per pipeline, a child per stage that ran. Tracking never decides anything and never
stops a stage: whatever a stage says becomes an event (`journal`); events go to the server until one
fails, and from then on to a file under `tracking/pending/`, with their times, for

    python -m tasks.common.tracking replay FILE --uri URI

Waits are bounded: about half a minute, once, for a server that accepts and does not answer; seconds
for one that refuses. Without a `uri` the record is `tracking/mlflow.db` under the data root, to be
looked at with `mlflow ui --backend-store-uri sqlite:///data/tracking/mlflow.db`. Which stages share
a pipeline: see `pipelines`."""

import argparse
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from tasks.common.files import ArtifactError, digest_file, read_json
from tasks.common.journal import MAX_TAG, Event, Journal, Tracker, Write, key_of, refused, shorten
from tasks.common.layout import Layout
from tasks.common.pipelines import (
    PIPELINE_VARIABLE,
    git_tags,
    has_no_record,
    is_alive,
    mark_recorded,
    outputs,
    start_event,
    start_pipeline,
    this_host,
)

__all__ = [
    "PIPELINE_VARIABLE",
    "Tracker",
    "Tracking",
    "end_pipeline",
    "find_producer",
    "replay",
    "start_pipeline",
    "track",
]

logger = logging.getLogger(__name__)

ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_LOGGING_LEVEL": "CRITICAL",  # its tracebacks; what matters is said here, once
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
}
MAX_BATCH = 100
MAX_METRICS = 1000


@dataclass(frozen=True)
class Tracking:
    """The section `tracking`: where the record goes."""

    uri: str | None
    experiment: str
    log_weights: bool


@dataclass(frozen=True)
class Run:
    """One run on one server, and its parent."""

    client: Any
    experiment_id: str
    run_id: str
    parent_id: str


# ----------------------------------------------------------------------------------------------
# what a stage says


@contextmanager
def track(
    settings: Tracking, layout: Layout, stage: str, recipe: str | None, seed: int | None
) -> Iterator[Tracker]:
    """Open the record of one stage; close it FINISHED, FAILED, or KILLED when interrupted.
    Exceptions go on."""
    uri, start = (
        address(settings, layout),
        start_event(layout, settings.experiment, stage, recipe, seed),
    )
    journal = Journal(uri, start, layout.tracking, partial(open_stage, layout, uri, start))
    tracker = Tracker(journal, layout.root, settings.log_weights)
    status = "FAILED"
    try:
        yield tracker
        status = "FINISHED"
        for path in outputs(layout, stage, recipe, seed):
            tracker.output(path, digest_file(path))
    except KeyboardInterrupt:
        status = "KILLED"
        raise
    except Exception as error:
        tracker.tags({"error": f"{type(error).__name__}: {error}"})
        raise
    finally:
        tracker.flush()
        journal.tell(
            "end", status=status, closes_parent=journal.start["pipeline"]["kind"] != "flow"
        )


# -------------------------------------------------------------------------- events: to the server,
# or to a file


def open_stage(layout: Layout, uri: str, start: Event) -> Write:
    """Make the stage's run, note that its pipeline now has one, and return what writes into it."""
    run = open_run(connect(uri), uri, start)
    mark_recorded(layout, start["pipeline"]["id"])
    return partial(write_event, run)


def replay(path: Path, uri: str) -> str:
    """Write a pending file to the server at `uri`, into the run it began in if that is there.
    Returns the run's id.

    A file whose stage is still writing is refused; a whole replay renames the file to `.replayed`.
    """
    events = [json.loads(line) for line in path.read_text().splitlines()]
    if events[-1]["kind"] != "end":
        if is_alive(events[0]["tags"]):
            raise BlockingIOError(
                f"{path} is still being written by process {events[0]['tags']['process']}"
            )
        events.append({"kind": "end", "time": events[-1]["time"], "status": "KILLED"})
    run = open_run(connect(uri), uri, events[0])
    for event in events[1:]:
        try:
            write_event(run, {**event, "closes_parent": True})
        except Exception as error:
            if not refused(error):
                raise
            logger.warning("MLflow does not take this %s: %s", event["kind"], error)
    path.rename(path.with_suffix(".replayed"))
    return run.run_id


# ------------------------------------------------------------------------------------------- runs
# on the server


def connect(uri: str) -> Any:
    """A client with bounded waits. The import takes a second and the database another: only
    here."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    import mlflow
    from mlflow.store.db import utils

    from tasks.common.locations import quiet_loggers

    quiet_loggers()  # boto3, with which MLflow keeps artifacts on s3://

    utils.MAX_RETRY_COUNT = 3  # tries to reach a database: MLflow's ten take 100 s
    return mlflow.MlflowClient(tracking_uri=uri, registry_uri=uri)


def address(settings: Tracking, layout: Layout) -> str:
    """The server's URI, or the database under the data root."""
    return settings.uri or f"sqlite:///{layout.tracking.absolute() / 'mlflow.db'}"


def open_run(client: Any, uri: str, start: Event) -> Run:
    """The child run of `start`, made if it is not there, and the parent of its pipeline
    likewise."""
    experiment = experiment_id(client, uri, start["experiment"])
    close_dead(client, experiment)
    parent = parent_run(client, experiment, start)
    found = client.search_runs([experiment], f"tags.record = '{start['record']}'", max_results=1)
    if found:
        return Run(client, experiment, found[0].info.run_id, parent)
    tags = {
        **start["tags"],
        "record": start["record"],
        "mlflow.parentRunId": parent,
        "mlflow.source.type": "LOCAL",
    }
    run = client.create_run(experiment, start_time=start["time"], run_name=start["name"], tags=tags)
    return Run(client, experiment, run.info.run_id, parent)


def experiment_id(client: Any, uri: str, name: str) -> str:
    """The experiment's id. Beside a sqlite file stand its artifacts, at an absolute path, as MLflow
    needs it."""
    experiment = client.get_experiment_by_name(name)
    if experiment is not None:
        return str(experiment.experiment_id)
    beside = Path(uri.removeprefix("sqlite:///")).absolute().parent / "artifacts"
    try:
        place = beside.as_uri() if uri.startswith("sqlite:///") else None
        return str(
            client.create_experiment(
                name, place, {"mlflow.experimentKind": "custom_model_development"}
            )
        )
    except Exception:
        experiment = client.get_experiment_by_name(name)  # another pipeline was first
        if experiment is None:
            raise
        return str(experiment.experiment_id)


def parent_run(client: Any, experiment: str, start: Event) -> str:
    """The open run of the pipeline, found by its tag."""
    pipeline = start["pipeline"]
    found = client.search_runs([experiment], f"tags.pipeline = '{pipeline['id']}'", max_results=1)
    if found:
        client.update_run(found[0].info.run_id, status="RUNNING")
        return str(found[0].info.run_id)
    tags = {
        "pipeline": pipeline["id"],
        "started_by": pipeline["kind"],
        **git_tags(),
        **pipeline["tags"],
    }
    name = f"{pipeline['kind']} {pipeline['id']}"
    return str(
        client.create_run(
            experiment, start_time=start["time"], run_name=name, tags=tags
        ).info.run_id
    )


def close_dead(client: Any, experiment: str) -> None:
    """Mark runs KILLED that say RUNNING and whose process on this machine is gone: nobody else
    will."""
    running = f"attributes.status = 'RUNNING' AND tags.host = '{this_host()}'"
    for run in client.search_runs([experiment], running):
        if not is_alive(run.data.tags):
            client.set_terminated(run.info.run_id, "KILLED")


def producer(client: Any, experiment: str, key: str, digest: str) -> str | None:
    """The latest run with the output `key` of this digest."""
    found = client.search_runs([experiment], f"tags.`output.{key}` = '{digest}'", max_results=1)
    return str(found[0].info.run_id) if found else None


def find_producer(settings: Tracking, layout: Layout, path: Path) -> str | None:
    """The id of the run that made the file `path` as it is now, or None. Raises when the server is
    away."""
    client, uri = connect(address(settings, layout)), address(settings, layout)
    experiment = experiment_id(client, uri, settings.experiment)
    return producer(client, experiment, key_of(layout.root, path), digest_file(path))


# ------------------------------------------------------------------------------------- one writer a
# kind of event


def write_params(run: Run, event: Event) -> None:
    from mlflow.entities import Param

    entries = [Param(key, value) for key, value in event["values"].items()]
    for first in range(0, len(entries), MAX_BATCH):
        run.client.log_batch(run.run_id, params=entries[first : first + MAX_BATCH])


def write_metrics(run: Run, event: Event) -> None:
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


def write_tags(run: Run, event: Event) -> None:
    from mlflow.entities import RunTag

    entries = [RunTag(key, value) for key, value in event["values"].items()]
    for first in range(0, len(entries), MAX_BATCH):
        run.client.log_batch(run.run_id, tags=entries[first : first + MAX_BATCH])


def write_dataset(run: Run, event: Event) -> None:
    from mlflow.entities import Dataset, DatasetInput, InputTag

    key, digest = event["key"], event["digest"]
    source = json.dumps({"uri": Path(event["path"]).as_uri()})
    dataset = Dataset(event["name"], digest[:36], "local", source)
    run.client.log_inputs(
        run.run_id, [DatasetInput(dataset, [InputTag("mlflow.data.context", event["context"])])]
    )
    write_tags(run, {"values": link(run, "input", key, digest)})


def write_output(run: Run, event: Event) -> None:
    run.client.set_tag(run.run_id, f"output.{event['key']}", event["digest"])


def write_artifact(run: Run, event: Event) -> None:
    path = Path(event["path"])
    if path.is_dir():
        run.client.log_artifacts(run.run_id, str(path), path.name)
    elif path.exists():
        run.client.log_artifact(run.run_id, str(path))
    else:
        logger.warning("%s does not exist: it is not kept with the run", path)


def write_model(run: Run, event: Event) -> None:
    from mlflow.entities import LoggedModelOutput

    tags = {"digest": event["digest"], "path": event["path"], "key": event["key"]}
    name = "".join(
        letter if letter.isalnum() or letter in "-_" else "-" for letter in event["name"]
    )
    model = run.client.create_logged_model(run.experiment_id, name, run.run_id, tags)
    if event["weights"]:
        run.client.log_model_artifacts(model.model_id, event["path"])
    run.client.finalize_logged_model(model.model_id, "READY")
    run.client.log_outputs(run.run_id, [LoggedModelOutput(model.model_id, 0)])
    write_output(run, event)


def write_champion(run: Run, event: Event) -> None:
    """Mirror the report's decision: register the policy that training wrote with the evidence,
    under an alias.

    Where that training was never recorded here, no alias is better than the former one.
    """
    client, found = run.client, event["evidence"]
    name = client.get_experiment(run.experiment_id).name
    run_id = found and producer(client, run.experiment_id, found["key"], found["digest"])
    models = run_id and client.search_logged_models(
        [run.experiment_id], f"source_run_id = '{run_id}'"
    )
    named = {
        "champion": found["key"] if found else "none",
        "champion.why": shorten(event["why"], MAX_TAG),
    }
    write_tags(run, {"values": {**named, **({"champion.run": run_id} if run_id else {})}})
    if not client.search_registered_models(f"name = '{name}'"):
        client.create_registered_model(name)
    if not models:
        client.delete_registered_model_alias(name, "champion")
        return
    tags, source = {"digest": models[0].tags["digest"]}, models[0].artifact_location
    known = client.search_model_versions(f"name = '{name}' AND tags.digest = '{tags['digest']}'")
    version = (
        known[0]
        if known
        else client.create_model_version(name, source, run_id, tags, model_id=models[0].model_id)
    )
    client.set_registered_model_alias(name, "champion", version.version)


def write_end(run: Run, event: Event) -> None:
    """Close the run. A flow closes the parent itself; elsewhere it ends with each child, failed if
    one failed."""
    run.client.set_terminated(run.run_id, event["status"], event["time"])
    if event["closes_parent"]:
        bad = f"tags.`mlflow.parentRunId` = '{run.parent_id}' AND attributes.status != 'FINISHED'"
        failed = run.client.search_runs([run.experiment_id], bad, max_results=1)
        run.client.set_terminated(run.parent_id, "FAILED" if failed else "FINISHED", event["time"])


WRITERS: dict[str, Callable[[Run, Event], None]] = {
    "params": write_params,
    "metrics": write_metrics,
    "tags": write_tags,
    "dataset": write_dataset,
    "output": write_output,
    "artifact": write_artifact,
    "model": write_model,
    "champion": write_champion,
    "end": write_end,
}


def write_event(run: Run, event: Event) -> None:
    """Write one event into its run. Raises what MLflow raises."""
    WRITERS[event["kind"]](run, event)


def link(run: Run, kind: str, key: str, digest: str) -> dict[str, str]:
    """Tags that name an input or a cached output by digest, and the run that made it where one is
    known."""
    made_by = producer(run.client, run.experiment_id, key, digest)
    return {f"{kind}.{key}": digest, **({f"{kind}.{key}.run": made_by} if made_by else {})}


# --------------------------------------------------------------------------------------------------
# pipelines


def end_pipeline(
    settings: Tracking,
    layout: Layout,
    pipeline: str,
    status: str = "FINISHED",
    cached: Iterable[tuple[str, str | None, int | None]] = (),
) -> None:
    """Close the parent run, with links to the runs that made what was cached: (stage, recipe, seed)
    each.

    A pipeline in which no stage ran has no run, and gets none.
    """
    try:
        if has_no_record(layout, pipeline):
            return
        uri = address(settings, layout)
        client = connect(uri)
        experiment = experiment_id(client, uri, settings.experiment)
        for parent in client.search_runs(
            [experiment], f"tags.pipeline = '{pipeline}'", max_results=1
        ):
            run = Run(client, experiment, parent.info.run_id, parent.info.run_id)
            for path in [path for coordinates in cached for path in outputs(layout, *coordinates)]:
                write_tags(
                    run,
                    {"values": link(run, "cached", key_of(layout.root, path), digest_file(path))},
                )
            client.set_terminated(run.run_id, status)
        close_dead(client, experiment)
    except Exception as error:  # as everywhere here: a record stops nothing
        logger.warning("the pipeline's run at %s stays open: %s", address(settings, layout), error)
    finally:
        with suppress(OSError, ArtifactError):
            if read_json(layout.tracking / "pipeline.json")["id"] == pipeline:
                (layout.tracking / "pipeline.json").unlink()


# ------------------------------------------------------------------------------------------------
# small helpers


def main() -> None:
    """The command line: replay pending records."""
    parser = argparse.ArgumentParser(prog="python -m tasks.common.tracking")
    command = parser.add_subparsers(required=True).add_parser(
        "replay", help="write pending records to a server"
    )
    command.add_argument("files", type=Path, nargs="+", metavar="FILE")
    command.add_argument("--uri", required=True, help="http://..., or sqlite:///PATH")
    arguments = parser.parse_args()
    for path in arguments.files:
        print(f"{path} is run {replay(path, arguments.uri)} at {arguments.uri}")


if __name__ == "__main__":
    main()
