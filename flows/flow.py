"""The Prefect flow: one task a stage, each brought up to date by DVC.

The tasks pass names only and keep no cache of Prefect's: whether something must run is DVC's
decision alone. A stage that failed keeps those that need it from running; the others go on.

Importing Prefect takes two seconds, so `flows.pipeline` imports this only where there is something
to run or to record."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Annotated, Any

from prefect import Flow, Task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.states import Completed
from pydantic import Field

from flows import commands, doctor, logs, overrides, records, summary
from flows.stages import Stages, code_version
from tasks.common import process
from tasks.common.layout import Layout

logs.speak()  # after Prefect's import, which silences the root logger

OverrideText = Annotated[str, Field(pattern=r"^[^=\s]+=")]
LAYOUT = Layout(commands.ROOT / "data")


@dataclass(frozen=True)
class Request:
    """What a run is asked for: some recipes and seeds, stages to force, values of params.yaml."""

    recipes: list[str]
    seeds: list[str]
    force: list[str]
    overrides: list[str]


class PipelineError(RuntimeError):
    """Stages failed; the message names them."""


def as_task(stages: Stages, stage: str, retries: int) -> Task[[str], State]:
    """The Prefect task of one stage. It is handed the name only."""

    def bring_up_to_date(stage: str) -> State:
        watch = stages.dvc.watch = records.Watch(stage)
        try:
            name, reason = stages.bring_up_to_date(stage)
        finally:
            watch.finish(stages.dvc.output)
            stages.dvc.watch = None
        if name != "Cached":
            records.tables(stage, LAYOUT)
        return Completed(name=name, message=reason)

    return Task(
        bring_up_to_date,
        name=stage,
        task_run_name=stage,
        version=code_version(stage),
        cache_policy=NO_CACHE,
        persist_result=False,
        retries=retries,
    )


def run_all(stages: Stages, retries: int) -> dict[str, State]:
    """Every stage in order; one that needs a stage which did not complete does not run (Prefect's
    NotReady)."""
    states: dict[str, State] = {}
    for stage in stages.ordered:
        needed = {name: states[name] for name in sorted(stages.needs[stage]) if name in states}
        states[stage] = as_task(stages, stage, retries)(
            stage, wait_for=list(needed.values()), return_state=True
        )
        if states[stage].is_crashed():
            raise KeyboardInterrupt(stage)
        blocking = [name for name, state in needed.items() if not state.is_completed()]
        if blocking:
            stages.say(stage, "not run", f"it needs {', '.join(blocking)}")
        elif not states[stage].is_completed():
            stages.say(stage, "FAILED", str(states[stage].message).partition("\n")[0])
    return states


def run(stages: Stages, retries: int) -> dict[str, str]:
    """Every stage's final state by name. Raises PipelineError when not all of them completed."""
    states = run_all(stages, retries)
    failed = [stage for stage, state in states.items() if state.is_failed()]
    if failed:
        raise PipelineError(f"failed: {', '.join(failed)}; {summary.conclusion(stages)}")
    return {stage: str(state.name) for stage, state in states.items()}


@contextmanager
def examined(request: Request) -> Iterator[Stages]:
    """The stages of a request, while no other flow runs here."""
    with (
        process.exclusive(LAYOUT.locks / "pipeline", "the pipeline"),
        overrides.applied(commands.ROOT / "params.yaml", LAYOUT, request.overrides),
        commands.Dvc() as dvc,
    ):
        yield doctor.examine(dvc, request.recipes, request.seeds, request.force)


def flow_over(
    look: Callable[[Request], AbstractContextManager[Stages]],
) -> Flow[Any, dict[str, str]]:
    """The flow, over the stages that `look` finds for a request."""

    def winnow(
        recipes: list[str] | None = None,
        seeds: list[int] | None = None,
        force: list[str] | None = None,
        retries: Annotated[int, Field(ge=0)] = 0,
        overrides: list[OverrideText] | None = None,
    ) -> dict[str, str]:
        """Bring the experiment up to date; returns the name of every stage's final state.

        Args:
            recipes: Only these recipes of the experiment.
            seeds: Only these seeds of the experiment.
            force: Stages to run although nothing changed: `ingest`, when a source has new rows
                under its old name.
            retries: How often a stage that failed is tried again.
            overrides: Values of params.yaml for this run alone, as KEY=VALUE:
                `train.learning_rate=1e-4`, `experiment.seeds=[0,1]`.
        """
        chosen = [str(seed) for seed in seeds or []]
        with look(Request(recipes or [], chosen, force or [], overrides or [])) as stages:
            records.attempt(lambda: records.name_run(stages))
            if stages.idle:
                return run(stages, retries)
            if len(stages.stale) > 1:  # one alone imports its libraries just as fast itself
                stages.dvc.fork_stages()
            with summary.recorded(LAYOUT, stages):
                return run(stages, retries)

    return Flow(
        winnow,
        name="winnow",
        persist_result=False,
        on_failure=[records.notify],
        on_crashed=[records.notify],
    )


pipeline = flow_over(examined)
"""The flow by itself, for schedules and workers."""
