"""Runs on a server: the run of a pipeline, in it a run for each cell (recipe and seed), and in
those the runs of stages. Which run made a file is found again by the file's digest."""

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from tasks.common.journal import Event
from tasks.common.pipelines import git_tags, is_alive, round_words, this_host

T = TypeVar("T")

# of the whole of what is asked of a server at once. MLflow limits the wait for the next packet
# alone, which a server that sends a byte now and then never exceeds
CALL_SECONDS = 60.0
ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",  # a line a run, with a tracking server
    "MLFLOW_LOGGING_LEVEL": "CRITICAL",  # its tracebacks; what matters is said here, once
    "MLFLOW_SQLALCHEMYSTORE_POOLCLASS": "NullPool",  # or a database that was replaced stays open
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
}
# All digests of files are tags that begin so: `digest.output.PATH`, `digest.input.PATH`, and
# `digest.cached.PATH` of what a pipeline did not make anew. `run.KIND.PATH` is the run that made
# the file.
DIGEST = "digest"


@dataclass(frozen=True)
class TrackedRun:
    """One run on one server, the run of its pipeline, and the run of its cell, if it has one; and
    the round of the experiment that all of them are of."""

    client: Any
    experiment_id: str
    run_id: str
    parent_id: str
    cell_id: str | None = None
    round: str = "1"


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


def within(seconds: float, call: Callable[[], T]) -> T:
    """What `call` returns. Raises TimeoutError where it takes longer: it then goes on in a thread
    that ends with the process."""
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
        raise TimeoutError(f"the tracking server did not answer in full within {seconds:g} s")
    return result.result()


def open_run(client: Any, uri: str, start: Event) -> TrackedRun:
    """The run of a stage, made if it is not there, and likewise those of its pipeline and cell."""
    return within(CALL_SECONDS, partial(find_or_make_run, client, uri, start))


def find_or_make_run(client: Any, uri: str, start: Event) -> TrackedRun:
    """As `open_run`, however long the server takes."""
    experiment = experiment_id(client, uri, start["experiment"])
    close_dead(client, experiment)
    parent = parent_run(client, experiment, start)
    cell = start["tags"].get("seed") and cell_run(
        client, experiment, parent, start["tags"]["recipe"], int(start["tags"]["seed"]), start
    )
    number = round_tag(start)
    found = client.search_runs([experiment], f"tags.record = '{start['record']}'", max_results=1)
    if found:
        return TrackedRun(client, experiment, found[0].info.run_id, parent, cell or None, number)
    tags = {
        **start["tags"],
        "kind": "stage",
        "record": start["record"],
        "mlflow.parentRunId": cell or parent,
        "mlflow.source.type": "LOCAL",
    }
    run = client.create_run(experiment, start_time=start["time"], run_name=start["name"], tags=tags)
    return TrackedRun(client, experiment, run.info.run_id, parent, cell or None, number)


def round_tag(start: Event) -> str:
    """The round of a record; those of an older version of this program say nothing of it."""
    return str(start["tags"].get("round", "1"))


def cell_run(
    client: Any, experiment: str, parent: str, recipe: str, seed: int, start: Event
) -> str:
    """The run of a recipe and seed in a pipeline, open again."""
    found = find_cell(client, experiment, parent, f"{recipe}/{seed}")
    if found:
        client.update_run(found.info.run_id, status="RUNNING")
        return str(found.info.run_id)
    tags = {
        "kind": "cell",
        "cell": f"{recipe}/{seed}",
        "recipe": recipe,
        "seed": str(seed),
        "round": round_tag(start),
        "mlflow.parentRunId": parent,
        **git_tags(),
        **start["pipeline"]["tags"],
    }
    run = client.create_run(
        experiment,
        start_time=start["time"],
        run_name=cell_name(f"{recipe}/{seed}", round_tag(start)),
        tags=tags,
    )
    return str(run.info.run_id)


def cell_name(cell: str, number: str) -> str:
    """The name of a cell's run."""
    return f"{cell}{round_words(number)}"


def find_cell(client: Any, experiment: str, parent: str, cell: str) -> Any:
    """The run of a cell in the pipeline `parent`, or None."""
    where = f"tags.cell = '{cell}' AND tags.`mlflow.parentRunId` = '{parent}'"
    return next(iter(client.search_runs([experiment], where, max_results=1)), None)


def close_with_children(run: TrackedRun, run_id: str, time: int | None) -> None:
    """Close a run that holds others: failed if one of them did not finish."""
    bad = f"tags.`mlflow.parentRunId` = '{run_id}' AND attributes.status != 'FINISHED'"
    failed = run.client.search_runs([run.experiment_id], bad, max_results=1)
    run.client.set_terminated(run_id, "FAILED" if failed else "FINISHED", time)


def close_cells(pipeline: TrackedRun) -> None:
    """Close the cells of a pipeline that is over: a stage that was killed has left its own open."""
    open_cells = (
        f"tags.`mlflow.parentRunId` = '{pipeline.run_id}' AND tags.kind = 'cell' "
        "AND attributes.status = 'RUNNING'"
    )
    for cell in pipeline.client.search_runs([pipeline.experiment_id], open_cells):
        close_with_children(pipeline, cell.info.run_id, None)


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
        "kind": "pipeline",
        "pipeline": pipeline["id"],
        "started_by": pipeline["kind"],
        "round": round_tag(start),
        **git_tags(),
        **pipeline["tags"],
    }
    name = f"{pipeline['kind']} {pipeline['id']}{round_words(round_tag(start))}"
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
    found = client.search_runs(
        [experiment], f"tags.`{DIGEST}.output.{key}` = '{digest}'", max_results=1
    )
    return str(found[0].info.run_id) if found else None


def link(run: TrackedRun, kind: str, key: str, digest: str) -> dict[str, str]:
    """Tags that name an input or a cached output by digest, and the run that made it where one is
    known."""
    made_by = producer(run.client, run.experiment_id, key, digest)
    named = {f"{DIGEST}.{kind}.{key}": digest}
    return {**named, **({f"run.{kind}.{key}": made_by} if made_by else {})}
