"""The report's results in MLflow: the pipeline's run has the experiment's results, and the run of
each cell (recipe and seed) has all its settings and results, so that one search compares cells."""

from dataclasses import replace

import psutil

from tasks.common.tracking.journal import Event, refused
from tasks.common.tracking.pipelines import process_tags
from tasks.common.tracking.runs import TrackedRun, find_cell, first_run, link
from tasks.common.tracking.writers import (
    logger,
    write_dataset,
    write_metrics,
    write_params,
    write_tags,
)

NOTE = "mlflow.note.content"  # the tag with the description
RESULT = "cell.result"  # a tag of a cell's complete run: the digest of its result


def write_experiment(run: TrackedRun, event: Event) -> None:
    """Write the experiment's parameters, summary and answer into the pipeline's run."""
    pipeline = replace(run, run_id=run.parent_id)
    write_metrics(pipeline, event)
    write_settings(pipeline, event)
    if "headline" in event:  # not in files of earlier versions
        write_tags(pipeline, {"values": {NOTE: event["headline"]}})
        run.client.set_experiment_tag(run.experiment_id, NOTE, event["headline"])


def write_cell(run: TrackedRun, event: Event) -> None:
    """Write a cell's settings and results into its run in this pipeline. Without one, write them
    into a new run, unless some run already has the same result. The tag RESULT is written last and
    marks a complete result, so the report rewrites a result left incomplete by a kill. The
    pipeline's run gets the datasets of all cells."""
    client, cell = run.client, f"{event['recipe']}/{event['seed']}"
    for dataset in event["datasets"]:
        write_dataset(replace(run, run_id=run.parent_id), dataset)
    existing = find_cell(client, run.experiment_id, run.parent_id, cell)
    same = f"tags.`{RESULT}` = '{event['result']}'"
    known = existing or first_run(client, run.experiment_id, same)
    if known and known.data.tags.get(RESULT) == event["result"]:
        return
    tags = {key: str(event[key]) for key in ("recipe", "seed")}
    tags |= {"kind": "cell", "cell": cell, "mlflow.parentRunId": run.parent_id}
    tags |= process_tags(psutil.Process())  # to close it if this process is killed
    made = existing or client.create_run(run.experiment_id, run_name=cell, tags=tags)
    target = replace(run, run_id=made.info.run_id, cell_id=made.info.run_id)
    write_metrics(target, event)
    write_settings(target, event)
    for dataset in event["datasets"]:
        write_dataset(target, dataset)
    for output in event["outputs"]:
        write_tags(target, {"values": link(run, "result", output["key"], output["digest"])})
    write_tags(target, {"values": {RESULT: event["result"]}})
    client.set_terminated(target.run_id, "FINISHED")


def write_settings(run: TrackedRun, event: Event) -> None:
    """Write parameters. If MLflow rejects a changed value, log a warning and continue."""
    try:
        write_params(run, event)
    except Exception as error:
        if not refused(error):
            raise
        logger.warning("MLflow does not accept other parameters for this run: %s", error)
