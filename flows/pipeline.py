"""The experiment as a Prefect flow: one task a stage, each brought up to date by DVC.

    python -m flows.pipeline [--recipe sgpo ...] [--seed 0 ...] [--force ingest ...] [--retries 1]
    [--experiment all]

Every stage ends as `Cached` (nothing changed), `Restored` (its outputs were in DVC's run cache) or
`Ran`, with the reason. The tasks pass names only and keep no cache of Prefect's: whether something
must run is DVC's decision alone, so `dvc repro` after a flow does nothing, and a flow after `dvc
repro` does nothing. A stage that failed keeps those that need it from running; the others go on.

Without PREFECT_API_URL Prefect starts a server of its own for the time of the run.
"""

import argparse
import logging
import sys

from prefect import Task, flow
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.exceptions import TerminationSignal
from prefect.states import Completed

from flows import commands, experiment, server, summary
from flows.selection import SelectionError
from flows.stages import Stages, code_version
from tasks.common import process
from tasks.common.artifacts import Layout
from tasks.common.params import ParamsError

LAYOUT = Layout(commands.ROOT / "data")
REFUSALS = (SelectionError, ParamsError, commands.CommandError, server.ServerError)


class PipelineError(RuntimeError):
    """Stages failed; the message names them."""


def as_task(stages: Stages, stage: str, retries: int) -> Task[[str], State]:
    """The Prefect task of one stage. It is handed the name only."""

    def bring_up_to_date(stage: str) -> State:
        name, reason = stages.bring_up_to_date(stage)
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
            stages.say(stage, "FAILED", str(states[stage].message))
    return states


def run(stages: Stages, retries: int) -> dict[str, str]:
    """Every stage's final state by name. Raises PipelineError when not all of them completed."""
    states = run_all(stages, retries)
    failed = [stage for stage, state in states.items() if state.is_failed()]
    if failed:
        raise PipelineError(f"failed: {', '.join(failed)}; {summary.conclusion(stages)}")
    return {stage: str(state.name) for stage, state in states.items()}


@flow(name="winnow", persist_result=False)
def pipeline(
    recipes: list[str] | None = None,
    seeds: list[int] | None = None,
    force: list[str] | None = None,
    retries: int = 0,
) -> dict[str, str]:
    """Bring the experiment up to date; returns the name of every stage's final state.

    `recipes` and `seeds` restrict it to some cells. `force` names stages to run although nothing
    changed (`ingest`, when a source has new rows under its old name). `retries` repeats a stage
    that failed."""
    with process.exclusive(LAYOUT.locks / "pipeline", "the pipeline"):
        stages = Stages.examine(recipes or [], [str(seed) for seed in seeds or []], force or [])
        if stages.left_out:
            print(summary.left_out(stages), flush=True)
        if stages.idle:
            names = run(stages, retries)
        else:
            with summary.recorded(LAYOUT, stages):
                names = run(stages, retries)
        print(f"{summary.conclusion(stages)}\n", flush=True)
        return names


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m flows.pipeline", description="Bring the experiment up to date."
    )
    parser.add_argument("--recipe", action="append", help="only this recipe (may be repeated)")
    parser.add_argument(
        "--seed", action="append", type=int, help="only this seed (may be repeated)"
    )
    parser.add_argument(
        "--force", action="append", metavar="STAGE", help="run this stage although nothing changed"
    )
    parser.add_argument(
        "--experiment",
        metavar="RECIPES",
        help="first set experiment.recipes in params.yaml; or: all",
    )
    parser.add_argument(
        "--retries", type=int, default=0, help="how often a failed stage is tried again"
    )
    return parser.parse_args(arguments)


def main() -> int:
    """0, 1 when a stage failed or the request makes no sense, 130 when interrupted."""
    options = parse()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    process.interrupt_on_terminate()
    try:
        if options.experiment:
            experiment.set_recipes(commands.ROOT / "params.yaml", options.experiment)
        place = summary.prefect_place()
        server.provide()
        pipeline(options.recipe, options.seed, options.force, options.retries)
        print(f"{summary.places(LAYOUT)}\nPrefect   {place}", flush=True)
    except (PipelineError, *REFUSALS) as error:
        print(error, file=sys.stderr)
        return 1
    except (KeyboardInterrupt, TerminationSignal):
        print("interrupted; run the same command again to go on", file=sys.stderr)
        return process.INTERRUPTED
    return 0


if __name__ == "__main__":
    sys.exit(main())
