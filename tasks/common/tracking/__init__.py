"""The record of what ran, in MLflow. Only this folder imports mlflow, and only when something is to
be recorded.

A run per pipeline; in it a run per cell, which is a recipe and a seed, with all its settings and
what it reached; in those a run per stage that ran. Tracking never decides anything and never
stops a stage: whatever a stage says becomes an event (`journal`); events go to the server until one
fails, and from then on to a file under `tracking/pending/`, with their times, for

    python -m tasks.common.tracking replay FILE --uri URI

Waits are bounded: about half a minute, once, for a server that accepts and does not answer; a
minute for one that answers too slowly; seconds for one that refuses. Without a `uri` the record is
`tracking/mlflow.db` under the data root, to be looked at with `mlflow ui --backend-store-uri
sqlite:///data/tracking/mlflow.db`. Which stages share a pipeline: see `pipelines`."""

import logging
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

from tasks.common.files import ArtifactError, digest_file
from tasks.common.journal import (
    Event,
    Journal,
    Tracker,
    Write,
    key_of,
    locked,
    read_events,
    refused,
)
from tasks.common.layout import Layout
from tasks.common.pipelines import (
    PIPELINE_VARIABLE,
    has_no_record,
    is_alive,
    mark_recorded,
    outputs,
    start_event,
    start_pipeline,
)
from tasks.common.sealed import read_sealed
from tasks.common.tracking import database, runs
from tasks.common.tracking.events import write_event
from tasks.common.tracking.mirrors import Mirrors
from tasks.common.tracking.runs import (
    TrackedRun,
    close_cells,
    close_dead,
    connect,
    experiment_id,
    link,
    open_run,
    producer,
    within,
)
from tasks.common.tracking.settings import Tracking
from tasks.common.tracking.system import watched
from tasks.common.tracking.writers import write_tags

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


def address(settings: Tracking, layout: Layout) -> str:
    """The server's URI, or the database under the data root."""
    return settings.uri or f"sqlite:///{layout.tracking.absolute() / 'mlflow.db'}"


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
    if settings.also:
        journal.listeners.append(Mirrors(settings.also, layout, start).listen)
    tracker = Tracker(journal, layout.root, settings.max_weights_gb)
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
        journal.tell(
            "end", status=status, closes_parent=journal.start["pipeline"]["kind"] != "flow"
        )
        if journal.write is not None:
            replay_pending(layout, uri)


def open_stage(layout: Layout, uri: str, start: Event) -> Write:
    """Make the stage's run, note that its pipeline now has one, and return what writes into it."""
    run = opened(layout, uri, start)
    mark_recorded(layout, start["pipeline"]["id"])
    return partial(write_event, run)


def opened(layout: Layout, uri: str, start: Event) -> TrackedRun:
    """The stage's run. The database under the data root is made where it is missing, and replaced
    where it is at fault."""
    own = layout.tracking.absolute() / "mlflow.db"
    if uri != f"sqlite:///{own}":
        return open_run(connect(uri), uri, start)
    database.make(own)
    try:
        return open_run(connect(uri), uri, start)
    except Exception:
        if not database.replace(own):
            raise
        return open_run(connect(uri), uri, start)


def replay_pending(layout: Layout, uri: str) -> None:
    """Write what earlier stages could not, now that the server answers. What fails stays."""
    with suppress(OSError), locked(layout.tracking):
        for path in sorted((layout.tracking / "pending").glob("*.jsonl")):
            try:
                logger.info("%s is now run %s at %s", path, replay(path, uri), uri)
            except BlockingIOError:
                continue  # its stage is still writing
            except (ValueError, KeyError, IndexError) as error:
                logger.warning("%s is damaged and stays where it is: %s", path, error)
            except Exception as error:
                logger.warning("%s cannot be replayed yet: %s", path, error)
                return


def replay(path: Path, uri: str) -> str:
    """Write a pending file to the server at `uri`, into the run it began in if that is there.
    Returns the run's id.

    A file whose stage is still writing is refused; a whole replay renames the file to `.replayed`.
    """
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
            logger.warning("MLflow does not take this %s: %s", event["kind"], error)
    path.rename(path.with_suffix(".replayed"))
    return run.run_id


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
        within(
            runs.CALL_SECONDS,
            partial(close_pipeline, settings, layout, pipeline, status, list(cached)),
        )
    except Exception as error:  # as everywhere here: a record stops nothing
        logger.warning("the pipeline's run at %s stays open: %s", address(settings, layout), error)
    finally:
        with suppress(OSError, ArtifactError):
            if read_sealed(layout.tracking / "pipeline.json")["id"] == pipeline:
                (layout.tracking / "pipeline.json").unlink()


def close_pipeline(
    settings: Tracking,
    layout: Layout,
    pipeline: str,
    status: str,
    cached: Sequence[tuple[str, str | None, int | None]],
) -> None:
    """As `end_pipeline`. Raises what MLflow raises, however long the server takes."""
    uri = address(settings, layout)
    client = connect(uri)
    experiment = experiment_id(client, uri, settings.experiment)
    for parent in client.search_runs([experiment], f"tags.pipeline = '{pipeline}'", max_results=1):
        run = TrackedRun(client, experiment, parent.info.run_id, parent.info.run_id)
        for path in [path for coordinates in cached for path in outputs(layout, *coordinates)]:
            write_tags(
                run,
                {"values": link(run, "cached", key_of(layout.root, path), digest_file(path))},
            )
        close_cells(run)
        client.set_terminated(run.run_id, status)
    close_dead(client, experiment)


def find_producer(settings: Tracking, layout: Layout, path: Path) -> str | None:
    """The id of the run that made the file `path` as it is now, or None. Raises when the server is
    away."""
    client, uri = connect(address(settings, layout)), address(settings, layout)
    experiment = experiment_id(client, uri, settings.experiment)
    return producer(client, experiment, key_of(layout.root, path), digest_file(path))
