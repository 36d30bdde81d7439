"""What the report knows, in MLflow: the run of each cell (recipe and seed) with all its settings
and results, so that one search compares them; and the pipeline's run with the experiment's."""

from dataclasses import replace

import psutil

from tasks.common.journal import Event, refused
from tasks.common.pipelines import process_tags
from tasks.common.tracking.runs import DIGEST, TrackedRun, cell_name, find_cell, link, producer
from tasks.common.tracking.writers import (
    logger,
    write_dataset,
    write_metrics,
    write_params,
    write_tags,
)

RESULT = "cell.result"  # the tag of a cell's run that has all of a result: what it is a digest of


def write_experiment(run: TrackedRun, event: Event) -> None:
    """The experiment's parameters and summary, in the pipeline's run."""
    pipeline = replace(run, run_id=run.parent_id)
    write_metrics(pipeline, event)
    write_settings(pipeline, event)


def write_cell(run: TrackedRun, event: Event) -> None:
    """A cell's settings and results in its run: the one in which its stages ran, else a new one; or
    none, where an earlier pipeline recorded the same result. That is known by a tag which comes
    last: a report that was killed begins again."""
    client, cell = run.client, f"{event['recipe']}/{event['seed']}"
    found = find_cell(client, run.experiment_id, run.parent_id, cell)
    same = f"tags.`{RESULT}` = '{event['result']}'"
    if client.search_runs([run.experiment_id], same, max_results=1):
        return
    tags = {key: str(event[key]) for key in ("recipe", "seed")}
    tags |= {"kind": "cell", "cell": cell, "round": run.round, "mlflow.parentRunId": run.parent_id}
    tags |= process_tags(psutil.Process())  # for who closes it when this process is killed
    name = cell_name(cell, run.round)
    made = found or client.create_run(run.experiment_id, run_name=name, tags=tags)
    target = replace(run, run_id=made.info.run_id, cell_id=None)
    write_metrics(target, event)
    write_settings(target, event)
    for dataset in event["datasets"]:
        write_dataset(target, dataset)
    for output in event["outputs"]:
        write_tags(target, {"values": link(run, "result", output["key"], output["digest"])})
    if event["table"] and not client.list_artifacts(target.run_id):
        client.log_table(target.run_id, event["table"], "rollouts.json")
    write_tags(target, {"values": {RESULT: event["result"]}})
    client.set_terminated(target.run_id, "FINISHED")


def write_benchmark(run: TrackedRun, event: Event) -> None:
    """A policy's results on benchmarks, in this run, and in the run of its cell where one is
    known."""
    write_metrics(run, event)
    cell = event["recipe"] and cell_of(run, event["evidence"])
    if cell:
        write_metrics(replace(run, run_id=cell), event)


def cell_of(run: TrackedRun, evidence: dict[str, str]) -> str | None:
    """The run of the cell whose training wrote the file `evidence`: the one that has its result,
    else the one in which it was trained."""
    key, value = evidence["key"], evidence["digest"]
    has_result = f"tags.`{DIGEST}.result.{key}` = '{value}' AND tags.kind = 'cell'"
    found = run.client.search_runs([run.experiment_id], has_result, max_results=1)
    if found:
        return str(found[0].info.run_id)
    training = producer(run.client, run.experiment_id, key, value)
    return training and run.client.get_run(training).data.tags.get("mlflow.parentRunId")


def write_settings(run: TrackedRun, event: Event) -> None:
    """Parameters. MLflow keeps the first value of each: others are said, and the rest goes on."""
    try:
        write_params(run, event)
    except Exception as error:
        if not refused(error):
            raise
        logger.warning("MLflow does not take other parameters for this run: %s", error)
