"""Bring the experiment up to date.

    python -m flows.pipeline [--recipe sgpo ...] [--seed 0 ...] [--force ingest ...] [--retries 1]
    [--concurrency 4] [--experiment all] [--rounds 2 [--from sgpo/0]] [--data other]
    [train.learning_rate=1e-4 ...]

Every stage ends as `Cached` (nothing changed), `Restored` (its outputs were in DVC's run cache) or
`Ran`, with the reason. Whether something must run is DVC's decision alone, so `dvc repro` after a
flow does nothing, and a flow after `dvc repro` does nothing.

Without PREFECT_API_URL Prefect starts a server of its own for the time of the run; where there is
nothing to run, it is not started at all.
"""

import argparse
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import chain

from flows import commands, logs, rounds, selection, server, side_by_side, summary
from flows.stages import Stages
from tasks.common import process
from tasks.common.files import ArtifactError
from tasks.common.params import ParamsError

REFUSALS = (selection.SelectionError, ParamsError, ArtifactError, commands.CommandError)

PROGRAM = sys.argv[0] if sys.argv[0].startswith("winnow ") else "python -m flows.pipeline"


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog=PROGRAM, description="Bring the experiment up to date.")
    selection.add_options(parser)
    parser.add_argument(
        "--experiment",
        metavar="RECIPES",
        help="first set experiment.recipes in params.yaml; or: all",
    )
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="KEY=VALUE",
        help="values of params.yaml for this run alone: train.learning_rate=1e-4",
    )
    rounds.add_options(parser)
    parser.add_argument(
        "--retries", type=int, default=0, help="how often a failed stage is tried again"
    )
    side_by_side.add_options(parser, 1)
    return parser.parse_args(arguments)


def bring_up_to_date(options: argparse.Namespace) -> int:
    """Look, and run what is stale: 0, or 1 when a stage failed. Roots with nothing to do are looked
    at without Prefect, as far as there are no others."""
    seen: list[Stages] = []
    with rounds.opened(rounds.request_of(options), options.experiment) as found:
        found = noted(found, seen)
        for stages in found:
            if not stages.idle:
                break
        place = summary.prefect_place()
        named = server.named_url()
        if not seen[-1].idle or (named and server.answers(named)):
            failure = run_flow(chain(list(seen), found), options)
            if failure:
                print(failure, file=sys.stderr)
                return 1
        print(f"{summary.conclusion(seen)}\n", flush=True)
    print(f"{summary.places(seen[-1].root)}\nPrefect   {place}", flush=True)
    return 0


def noted(found: Iterator[Stages], seen: list[Stages]) -> Iterator[Stages]:
    """The same stages, each put on the list when it has been looked at."""
    for stages in found:
        seen.append(stages)
        if stages.left_out:
            print(summary.left_out(stages), flush=True)
        yield stages


def run_flow(found: Iterator[Stages], options: argparse.Namespace) -> str:
    """Run the flow over the stages of each root; what failed, or nothing. Prefect is imported only
    here: it takes two seconds."""
    from httpx import HTTPError
    from prefect.exceptions import TerminationSignal

    from flows.flow import PipelineError, flow_over

    try:
        server.provide()
        flow = flow_over(lambda request: nullcontext(found))
        flow(
            options.recipe,
            options.seed,
            options.force,
            options.retries,
            options.overrides,
            options.concurrency,
            options.data,
            options.rounds,
            options.starts,
        )
    except (PipelineError, server.ServerError) as error:
        return str(error)
    except (HTTPError, RuntimeError) as error:
        if not isinstance(error, HTTPError) and not isinstance(error.__cause__, HTTPError):
            raise
        return server.lost(error)
    except TerminationSignal as error:
        raise KeyboardInterrupt from error
    return ""


def main() -> int:
    """0, 1 when a stage failed or the request makes no sense, 130 when interrupted."""
    options = parse()
    logs.speak()
    process.interrupt_on_terminate()
    try:
        return bring_up_to_date(options)
    except REFUSALS as error:
        print(error, file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted; run the same command again to go on", file=sys.stderr)
        return process.interrupted()


if __name__ == "__main__":
    sys.exit(main())
