"""The Prefect flow: one task per stage, each brought up to date by DVC.

The tasks pass names only and do not use Prefect's cache: DVC alone decides whether a stage must
run. A failed stage blocks the stages that need it; the others continue.

Importing Prefect takes two seconds, so `flows.cli.run` imports this module only if there is
something to run or to record."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Annotated, Any

from prefect import Flow, Task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.states import Completed
from pydantic import Field

from flows import logs
from flows.pipeline import (
    commands,
    crashes,
    overrides,
    records,
    selection,
    side_by_side,
    summary,
)
from flows.pipeline.request import FlowRequest, opened
from flows.pipeline.roots import MAIN
from flows.pipeline.stages import Stages, code_version

logs.log_to_terminal()  # after Prefect's import, which silences the root logger

OverrideText = Annotated[str, Field(pattern=r"^([^=\s]+=|~[^=\s]+$)")]


class PipelineError(RuntimeError):
    """Raised if stages failed; the message lists them."""


def as_task(
    stages: Stages, stage: str, retries: int, dvc: commands.Dvc, tags: set[str]
) -> Task[[str], State]:
    """Return the Prefect task of one stage. Its only argument is the name of the stage."""
    title = stages.root.titled(stage)

    def bring_up_to_date(stage: str) -> State:
        watch = dvc.watch = records.Watch(title)
        try:
            name, reason = stages.bring_up_to_date(stage, dvc)
        finally:
            watch.finish(dvc.output)
            dvc.watch = None
        if name != "Cached" and stage == "report":
            records.leaderboard(stages.root)
        return Completed(name=name, message=reason)

    return Task(
        bring_up_to_date,
        name=title,
        task_run_name=title,
        version=code_version(stages.root, stage),
        tags=tags,
        cache_policy=NO_CACHE,
        persist_result=False,
        retries=retries,
    )


def run_all(stages: Stages, retries: int, concurrency: int) -> dict[str, State]:
    """Run the stages in order, up to `concurrency` at once. Return their states: NotReady if a
    stage needs one that did not complete. Raise KeyboardInterrupt if a task crashes."""
    states: dict[str, State] = {}
    ready: list[str] = []
    sorter = selection.sorter({stage: stages.needs[stage] for stage in stages.ordered})
    with side_by_side.running(stages.dvc, concurrency, stages.root.params) as running:
        while sorter.is_active():
            ready = sorted([*ready, *sorter.get_ready()], key=stages.ordered.index)
            while ready and running.room:
                stage = ready.pop(0)
                needed = needed_states(stages, stage, states)

                def work(
                    dvc: commands.Dvc, tags: set[str], stage: str = stage, needed: Any = needed
                ) -> State:
                    task = as_task(stages, stage, retries, dvc, tags)
                    return task(stage, wait_for=list(needed.values()), return_state=True)

                running.start(stage, stages.root.titled(stage), work)
            for stage, state in running.ended():
                if state.is_crashed():
                    raise KeyboardInterrupt(stage)
                states[stage] = state
                sorter.done(stage)
                print_failure(stages, stage, states)
                if stage.startswith("evaluate@") and states[stage].name in ("Ran", "Restored"):
                    stages.write_page()
    return states


def needed_states(stages: Stages, stage: str, states: dict[str, State]) -> dict[str, State]:
    """Return the states of the stages that this stage needs, if they are part of this run."""
    return {name: states[name] for name in sorted(stages.needs[stage]) if name in states}


def print_failure(stages: Stages, stage: str, states: dict[str, State]) -> None:
    needed = needed_states(stages, stage, states)
    blocking = [name for name, state in needed.items() if not state.is_completed()]
    if blocking:
        stages.print_line(stage, "not run", f"it needs {', '.join(blocking)}")
    elif not states[stage].is_completed():
        stages.print_line(stage, "FAILED", str(states[stage].message).partition("\n")[0])


def run_root(stages: Stages, request: FlowRequest) -> dict[str, str]:
    """Run all stages, with an MLflow record if any is stale. Return the names of the final states,
    keyed by title. The flow run is named after the request, and after what may run, at the end what
    ran. Raise PipelineError if a stage failed."""
    forecast = records.forecast_of(stages)
    records.attempt(lambda: records.name_run(request.title, forecast))
    try:
        if len(stages.stale) > 1:  # a fork saves no import time for one stage
            stages.dvc.fork_stages()
        with nullcontext() if stages.idle else summary.recorded(stages):
            states = run_all(stages, request.retries, 1 if stages.idle else request.concurrency)
            failed = [stage for stage in stages.ordered if states[stage].is_failed()]
            if failed:
                titles = ", ".join(map(stages.root.titled, failed))
                raise PipelineError(f"failed: {titles}; {summary.conclusion(stages)}")
    finally:
        records.attempt(lambda: records.name_run(request.title, summary.conclusion(stages)))
    return {stages.root.titled(stage): str(states[stage].name) for stage in stages.ordered}


def flow_over(
    find_stages: Callable[[FlowRequest], AbstractContextManager[Stages]],
) -> Flow[Any, dict[str, str]]:
    """Return the flow, which runs the stages that `find_stages` yields."""

    def winnow(
        recipes: list[str] | None = None,
        seeds: list[int] | None = None,
        force: list[str] | None = None,
        retries: Annotated[int, Field(ge=0)] = 0,
        overrides: list[OverrideText] | None = None,
        concurrency: Annotated[int, Field(ge=1)] = 1,
        data: str = MAIN,
        until: list[str] | None = None,
    ) -> dict[str, str]:
        """Bring the experiment up to date; returns the name of every stage's final state.

        Args:
            recipes: Only these recipes of the experiment.
            seeds: Only these seeds of the experiment.
            force: Stages to run although nothing changed, for example `ingest` when a source has
                new rows under its old name.
            retries: The maximum number of retries of a failed stage.
            overrides: Values of params.yaml for this run alone (numbers, recipes and seeds), as
                KEY=VALUE: `train.learning_rate=1e-4`, `experiment.seeds=[0,1]`.
            concurrency: The maximum number of independent stages that run side by side.
            data: The data root: a folder at the top of the project. A new one gets a copy of
                params.yaml, for you to edit.
            until: Only these stages, and what they need: `profile`, `train`, `train@grpo-0`.
        """
        request = FlowRequest(
            recipes or [],
            seeds or [],
            force or [],
            overrides or [],
            data,
            concurrency,
            retries,
            until or [],
        )
        with crashes.noticed():
            records.attempt(crashes.mark)
            with find_stages(request) as stages:
                return run_root(stages, request)

    return Flow(
        winnow,
        name=commands.NAME,
        persist_result=False,
        on_failure=[records.notify],
        on_crashed=[records.notify],
    )


def stages_of_api_request(request: FlowRequest) -> AbstractContextManager[Stages]:
    """Return `opened` for an API request. Raise ParamsError for forbidden overrides."""
    overrides.check_remote(request.overrides)
    return opened(request)


pipeline = flow_over(stages_of_api_request)
"""The flow for schedules and workers."""
