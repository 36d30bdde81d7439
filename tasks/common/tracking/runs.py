"""Runs on a server: the run of a pipeline contains a run for each cell (recipe and seed), which
contains the runs of the cell's stages. The run that wrote a file is found by the file's digest."""

import logging
import os
import sqlite3
import threading
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import unquote, urlsplit

from tasks.common.tracking import views
from tasks.common.tracking.journal import Event
from tasks.common.tracking.pipelines import git_tags, is_alive, this_host

logger = logging.getLogger(__name__)
T = TypeVar("T")

# time limit for all requests of one call together. MLflow limits only the wait for the next packet,
# which a server that sends a byte now and then never exceeds
CALL_SECONDS = 60.0
ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",  # one line per run, with a tracking server
    "MLFLOW_LOGGING_LEVEL": "CRITICAL",  # its tracebacks; errors are logged here, once
    "MLFLOW_SQLALCHEMYSTORE_POOLCLASS": "NullPool",  # else a replaced database stays open
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
}
# columns of MLflow's tables with absolute paths or URIs
PLACES = (
    *("experiments.artifact_location", "runs.artifact_uri", "logged_models.artifact_location"),
    *("model_versions.source", "model_versions.storage_location", "model_version_tags.value"),
    "logged_model_tags.tag_value",
)
# The prefix of the tags with digests of files: `digest.output.PATH`, `digest.input.PATH`, and
# `digest.cached.PATH` for files that a pipeline did not write again. `run.KIND.PATH` is the run
# that wrote the file.
DIGEST = "digest"


@dataclass(frozen=True)
class TrackedRun:
    """One run on one server, with the id of its pipeline's run, and the id of its cell's run if
    there is one."""

    client: Any
    experiment_id: str
    run_id: str
    parent_id: str
    cell_id: str | None = None


def connect(uri: str) -> Any:
    """Return a client with bounded waits. Importing MLflow takes a second, and so does opening the
    database; both happen only here."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    import mlflow
    from mlflow.store.db import utils

    from tasks.common.locations import quiet_loggers

    quiet_loggers()  # boto3, with which MLflow keeps artifacts on s3://

    utils.MAX_RETRY_COUNT = 3  # attempts to reach a database: MLflow's ten take 100 s
    return mlflow.MlflowClient(tracking_uri=uri, registry_uri=uri)


def within(seconds: float, call: Callable[[], T]) -> T:
    """Return the result of `call`. Raise TimeoutError if it takes more than `seconds`; it then
    continues in a thread that ends with the process."""
    result = Future[T]()

    def run() -> None:
        try:
            result.set_result(call())
        except Exception as error:
            result.set_exception(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if not result.done():
        raise TimeoutError(f"the tracking server did not respond completely within {seconds:g} s")
    return result.result()


def open_run(client: Any, uri: str, start: Event) -> TrackedRun:
    """Return the run of a stage. Create missing runs: this one, its pipeline's and its cell's."""
    return within(CALL_SECONDS, partial(find_or_make_run, client, uri, start))


def find_or_make_run(client: Any, uri: str, start: Event) -> TrackedRun:
    """Return the run as `open_run` does, without a time limit."""
    experiment = experiment_id(client, uri, start["experiment"])
    close_dead(client, experiment)
    parent = parent_run(client, experiment, start)
    cell = cell_run(client, experiment, parent, start) if "seed" in start["tags"] else None
    existing = first_run(client, experiment, f"tags.record = '{start['record']}'")
    tags = {
        **start["tags"],
        "kind": "stage",
        "record": start["record"],
        "mlflow.parentRunId": cell or parent,
        "mlflow.source.type": "LOCAL",
    }
    run = existing or client.create_run(
        experiment, start_time=start["time"], run_name=start["name"], tags=tags
    )
    return TrackedRun(client, experiment, run.info.run_id, parent, cell)


def parent_run(client: Any, experiment: str, start: Event) -> str:
    """Return the id of the pipeline's run. Find the run by its tag and reopen it, or create it."""
    pipeline = start["pipeline"]
    found = first_run(client, experiment, f"tags.pipeline = '{pipeline['id']}'")
    tags = {"kind": "pipeline", "pipeline": pipeline["id"], "started_by": pipeline["kind"]}
    name = f"{pipeline['kind']} {pipeline['id']}"
    return found_or_made(client, experiment, found, start, name, tags)


def cell_run(client: Any, experiment: str, parent: str, start: Event) -> str:
    """Return the id of a cell's run in the pipeline `parent`. Reopen the run, or create it."""
    recipe, seed = (start["tags"][name] for name in ("recipe", "seed"))
    cell = f"{recipe}/{seed}"
    found = find_cell(client, experiment, parent, cell)
    tags = {"kind": "cell", "cell": cell, "recipe": recipe, "seed": seed}
    tags["mlflow.parentRunId"] = parent
    return found_or_made(client, experiment, found, start, cell, tags)


def found_or_made(
    client: Any, experiment: str, existing: Any, start: Event, name: str, tags: dict[str, str]
) -> str:
    """Reopen the run `existing` for child runs, or create one if it is None. Return its id."""
    if existing:
        client.update_run(existing.info.run_id, status="RUNNING")
        return str(existing.info.run_id)
    tags = {**tags, **git_tags(), **start["pipeline"]["tags"]}
    run = client.create_run(experiment, start_time=start["time"], run_name=name, tags=tags)
    return str(run.info.run_id)


def find_cell(client: Any, experiment: str, parent: str, cell: str) -> Any:
    """Return the run of a cell in the pipeline `parent`, or None."""
    where = f"tags.cell = '{cell}' AND tags.`mlflow.parentRunId` = '{parent}'"
    return first_run(client, experiment, where)


def first_run(client: Any, experiment: str, where: str) -> Any:
    """Return the latest of an experiment's runs that satisfy `where`, or None."""
    return next(iter(client.search_runs([experiment], where, max_results=1)), None)


def close_with_children(run: TrackedRun, run_id: str, time: int | None) -> None:
    """Close the run `run_id`, as FAILED if any of its child runs is not FINISHED."""
    bad = f"tags.`mlflow.parentRunId` = '{run_id}' AND attributes.status != 'FINISHED'"
    failed = first_run(run.client, run.experiment_id, bad)
    run.client.set_terminated(run_id, "FAILED" if failed else "FINISHED", time)


def close_cells(pipeline: TrackedRun) -> None:
    """Close the cells that remain open in a finished pipeline, for example after a killed stage."""
    open_cells = (
        f"tags.`mlflow.parentRunId` = '{pipeline.run_id}' AND tags.kind = 'cell' "
        "AND attributes.status = 'RUNNING'"
    )
    for cell in pipeline.client.search_runs([pipeline.experiment_id], open_cells):
        close_with_children(pipeline, cell.info.run_id, None)


def artifacts_beside(uri: str) -> Path:
    """Return the folder of the artifacts of a database in a file, `sqlite:///FILE`."""
    return Path(uri.removeprefix("sqlite:///")).absolute().parent / "artifacts"


def experiment_id(client: Any, uri: str, name: str) -> str:
    """Return the experiment's id; create it if it is missing. With sqlite, its artifacts are beside
    the database, at an absolute path, as MLflow requires."""
    experiment = client.get_experiment_by_name(name)
    place = artifacts_beside(uri).as_uri() if uri.startswith("sqlite:///") else None
    if experiment is None:
        try:
            return str(client.create_experiment(name, place, views.TAGS))
        except Exception:
            experiment = client.get_experiment_by_name(name)  # another pipeline was first
            if experiment is None:
                raise
    if place:
        follow_project(uri, experiment.artifact_location)
    if views.TAG not in experiment.tags:  # of an earlier version
        client.set_experiment_tag(experiment.experiment_id, views.TAG, views.TAGS[views.TAG])
    return str(experiment.experiment_id)


def page(uri: str, name: str) -> str:
    """Return the path of the experiment's view on the server; of the home page if the server does
    not respond or refuses."""
    try:
        return views.PATH.format(within(20.0, lambda: experiment_id(connect(uri), uri, name)))
    except Exception:  # of any kind
        return ""


def follow_project(uri: str, recorded: str) -> None:
    """Change all places in a data root's database to this data root, with a warning, if `recorded`,
    the place of an experiment's artifacts, is in another: a copy must not write into the original.
    """
    old, new = Path(unquote(urlsplit(recorded).path)), artifacts_beside(uri)
    parts = ("tracking", "artifacts")
    if (old.parts[-2:], new.parts[-2:]) != (parts, parts) or old.resolve() == new.resolve():
        return
    before, after = old.parents[1], new.parents[1]
    path = uri.removeprefix("sqlite:///")
    with closing(sqlite3.connect(path)) as database, database:
        for table, column in (place.split(".") for place in PLACES):
            for was, now in ((str(before), str(after)), (before.as_uri(), after.as_uri())):
                database.execute(
                    f"UPDATE {table} SET {column} = ? || substr({column}, ?) "
                    f"WHERE substr({column}, 1, ?) = ?",
                    (now, len(was) + 1, len(was) + 1, f"{was}/"),
                )
    logger.warning("%s was copied or moved from %s: its record now points here", after, before)


def close_dead(client: Any, experiment: str) -> None:
    """Mark RUNNING runs as KILLED if their process on this machine is gone: nothing else does
    so."""
    running = f"attributes.status = 'RUNNING' AND tags.host = '{this_host()}'"
    for run in client.search_runs([experiment], running):
        if not is_alive(run.data.tags):
            client.set_terminated(run.info.run_id, "KILLED")


def producer(client: Any, experiment: str, key: str, digest: str) -> str | None:
    """Return the id of the latest run whose output `key` has this digest, or None."""
    found = first_run(client, experiment, f"tags.`{DIGEST}.output.{key}` = '{digest}'")
    return str(found.info.run_id) if found else None


def link(run: TrackedRun, kind: str, key: str, digest: str) -> dict[str, str]:
    """Return tags with the digest of a file of a `kind` (input, cached or result), and with the run
    that wrote it if there is one."""
    made_by = producer(run.client, run.experiment_id, key, digest)
    named = {f"{DIGEST}.{kind}.{key}": digest}
    return {**named, **({f"run.{kind}.{key}": made_by} if made_by else {})}
