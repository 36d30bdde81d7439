"""Which function writes which kind of event, and the end of a run."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

from tasks.common.journal import Event, size_of
from tasks.common.tracking import runs
from tasks.common.tracking.models import write_champion, write_model
from tasks.common.tracking.results import write_benchmark, write_cell, write_experiment
from tasks.common.tracking.runs import TrackedRun, close_with_children, within
from tasks.common.tracking.writers import (
    write_artifact,
    write_dataset,
    write_metrics,
    write_output,
    write_params,
    write_tags,
)


def write_end(run: TrackedRun, event: Event) -> None:
    """Close the run, and its cell's. A flow closes the pipeline itself; elsewhere it ends with each
    stage."""
    run.client.set_terminated(run.run_id, event["status"], event["time"])
    if run.cell_id:
        close_with_children(run, run.cell_id, event["time"])
    if event["closes_parent"]:
        close_with_children(run, run.parent_id, event["time"])


WRITERS: dict[str, Callable[[TrackedRun, Event], None]] = {
    "params": write_params,
    "metrics": write_metrics,
    "tags": write_tags,
    "dataset": write_dataset,
    "output": write_output,
    "artifact": write_artifact,
    "model": write_model,
    "champion": write_champion,
    "experiment": write_experiment,
    "cell": write_cell,
    "benchmark": write_benchmark,
    "end": write_end,
}


UPLOAD_RATE = 5e6  # bytes a second, below which an upload is given up


def write_event(run: TrackedRun, event: Event) -> None:
    """Write one event into its run. Raises what MLflow raises, and TimeoutError where it takes
    longer than `CALL_SECONDS` and the time for what it uploads."""
    is_uploaded = event["kind"] == "artifact" or event.get("weights")
    uploaded = size_of(Path(event["path"])) if is_uploaded else 0
    within(runs.CALL_SECONDS + uploaded / UPLOAD_RATE, partial(WRITERS[event["kind"]], run, event))
