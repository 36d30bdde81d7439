"""The record of runs, in MLflow. Only this folder imports mlflow, and only if there is something to
record.

The run of a pipeline contains a run for each cell (recipe and seed), with all settings and results
of the cell. A cell's run contains a run for each executed stage. Tracking never decides anything
and never stops a stage: each record of a stage is an event (`journal`). Events go to the server
until one fails, and from then on to a file under `tracking/pending/`, with their times, for

    winnow push FILE URI

Waits are bounded: about half a minute, once, for a server that accepts requests but never responds;
a minute for slow responses; seconds for a refused connection. Without a `uri` the record is
`tracking/mlflow.db` under the data root, shown by `mlflow ui --backend-store-uri
sqlite:///data/tracking/mlflow.db`. See `pipelines` for which stages share a pipeline."""

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from tasks.common.files import digest_file
from tasks.common.layout import Layout
from tasks.common.tracking import database, runs
from tasks.common.tracking.journal import (
    Event,
    Journal,
    Tracker,
    Write,
    key_of,
    locked,
    read_events,
    refused,
    size_of,
)
from tasks.common.tracking.mirrors import Mirrors
from tasks.common.tracking.models import write_champion, write_model
from tasks.common.tracking.pipelines import (
    PIPELINE_VARIABLE,
    axis_of,
    is_alive,
    outputs,
    start_event,
    start_pipeline,
)
from tasks.common.tracking.results import write_cell, write_experiment
from tasks.common.tracking.runs import (
    TrackedRun,
    close_cells,
    close_dead,
    close_with_children,
    connect,
    experiment_id,
    first_run,
    link,
    open_run,
    within,
)
from tasks.common.tracking.settings import Tracking
from tasks.common.tracking.system import watched
from tasks.common.tracking.writers import (
    write_artifact,
    write_dataset,
    write_metrics,
    write_output,
    write_params,
    write_tags,
)

__all__ = [
    "PIPELINE_VARIABLE",
    "Tracker",
    "Tracking",
    "end_pipeline",
    "replay",
    "start_pipeline",
    "track",
]

logger = logging.getLogger(__name__)

SQLITE = "sqlite:///"
UPLOAD_RATE = 5e6  # bytes a second; a slower upload is aborted


def address(settings: Tracking, layout: Layout) -> str:
    """Return the server's URI, or the URI of the database under the data root."""
    return settings.uri or f"{SQLITE}{layout.tracking.absolute() / 'mlflow.db'}"


@contextmanager
def track(
    settings: Tracking, layout: Layout, stage: str, recipe: str | None, seed: int | None
) -> Iterator[Tracker]:
    """Open the record of one stage. Close it as FINISHED or FAILED, or as KILLED if interrupted.
    Exceptions propagate."""
    uri = address(settings, layout)
    start = start_event(layout, settings.experiment, stage, recipe, seed)
    journal = Journal(uri, start, layout.tracking, partial(open_stage, uri, start))
    if settings.also:
        journal.listeners.append(Mirrors(settings.also, layout, start).listen)
    tracker = Tracker(journal, layout.root, settings.max_weights_gb)
    tracker.axis = axis_of(layout, recipe or "", seed or 0)
    status = "FAILED"
    try:
        with watched(tracker):
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
        tracker.close()
        journal.record(
            "end", status=status, closes_parent=journal.start["pipeline"]["kind"] != "flow"
        )
        if journal.write is not None:
            replay_pending(layout, uri)


def open_stage(uri: str, start: Event) -> Write:
    """Create the run of a stage, and return the function that writes events into it. A missing
    database is created if it is a local file. A data root's damaged database is replaced."""
    path, is_file = Path(uri.removeprefix(SQLITE)).absolute(), uri.startswith(SQLITE)
    is_own = is_file and path.parts[-2:] == ("tracking", "mlflow.db")
    if is_file:
        database.make(path, is_private=is_own)
    try:
        run = open_run(connect(uri), uri, start)
    except Exception:
        if not (is_own and database.replace(path)):
            raise
        run = open_run(connect(uri), uri, start)
    return partial(write_event, run)


def write_end(run: TrackedRun, event: Event) -> None:
    """Close the run, and its cell's run. A flow closes the pipeline's run itself; otherwise each
    stage closes it, and the next stage reopens it."""
    run.client.set_terminated(run.run_id, event["status"], event["time"])
    if run.cell_id:
        close_with_children(run, run.cell_id, event["time"])
    if event["closes_parent"]:
        close_with_children(run, run.parent_id, event["time"])


WRITERS: dict[str, Callable[[TrackedRun, Event], None]] = {
    "params": write_params,
    "metrics": write_metrics,
    "benchmark": write_metrics,  # in pending files of earlier versions
    "tags": write_tags,
    "dataset": write_dataset,
    "output": write_output,
    "artifact": write_artifact,
    "model": write_model,
    "champion": write_champion,
    "experiment": write_experiment,
    "cell": write_cell,
    "end": write_end,
}


def write_event(run: TrackedRun, event: Event) -> None:
    """Write one event into its run. Raise MLflow's exceptions, and TimeoutError if it takes longer
    than `CALL_SECONDS` plus the time of its upload."""
    is_uploaded = event["kind"] == "artifact" or event.get("weights")
    uploaded = size_of(Path(event["path"])) if is_uploaded else 0
    within(runs.CALL_SECONDS + uploaded / UPLOAD_RATE, partial(WRITERS[event["kind"]], run, event))


def replay_pending(layout: Layout, uri: str) -> None:
    """Replay pending files of earlier stages, now that the server responds; keep any that fail."""
    with suppress(OSError), locked(layout.tracking):
        for path in sorted((layout.tracking / "pending").glob("*.jsonl")):
            try:
                logger.info("%s is now run %s at %s", path, replay(path, uri), uri)
            except BlockingIOError:
                continue  # the stage is still writing it
            except (ValueError, KeyError, IndexError) as error:
                logger.warning("%s is damaged and is not replayed: %s", path, error)
            except Exception as error:
                logger.warning("%s cannot be replayed yet: %s", path, error)
                return


def replay(path: Path, uri: str) -> str:
    """Write a pending file to the server at `uri`, into its original run if that exists. Return the
    run's id.

    Raise BlockingIOError if a stage is still writing the file, and ValueError if it is damaged.
    After a complete replay, rename the file to `.replayed`."""
    events = read_events(path)
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
            logger.warning("MLflow does not accept this %s: %s", event["kind"], error)
    path.rename(path.with_suffix(".replayed"))
    return run.run_id


def end_pipeline(
    settings: Tracking,
    layout: Layout,
    pipeline: str,
    status: str = "FINISHED",
    cached: Iterable[tuple[str, str | None, int | None]] = (),
) -> None:
    """Close the run of `pipeline`, with links to the runs of cached stages, each (stage, recipe,
    seed). Create no database for this if no stage has created one."""
    uri, links = address(settings, layout), list(cached)

    def close() -> None:
        client = connect(uri)
        experiment = experiment_id(client, uri, settings.experiment)
        parent = first_run(client, experiment, f"tags.pipeline = '{pipeline}'")
        if parent is not None:
            run = TrackedRun(client, experiment, parent.info.run_id, parent.info.run_id)
            for path in [path for coordinates in links for path in outputs(layout, *coordinates)]:
                made = link(run, "cached", key_of(layout.root, path), digest_file(path))
                write_tags(run, {"values": made})
            close_cells(run)
            client.set_terminated(run.run_id, status)
        close_dead(client, experiment)

    try:
        if not uri.startswith(SQLITE) or Path(uri.removeprefix(SQLITE)).exists():
            within(runs.CALL_SECONDS, close)
    except Exception as error:  # a record must not stop a stage
        logger.warning("the pipeline's run at %s remains open: %s", uri, error)
