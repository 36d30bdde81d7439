"""Bring the experiment up to date.

Every stage ends as `Cached` (nothing changed), `Restored` (its outputs were in DVC's run cache) or
`Ran`, with the reason. DVC alone decides whether a stage must run, so `dvc repro` after a flow does
nothing, and a flow after `dvc repro` does nothing.

Without PREFECT_API_URL the run starts its own Prefect server and stops it at the end. If nothing
has to run, no server is started."""

import argparse
import sys
from contextlib import nullcontext
from dataclasses import asdict, replace

from flows.cli import flags
from flows.pipeline import summary
from flows.pipeline.request import FlowRequest, opened
from flows.pipeline.stages import Stages
from flows.serve import server
from tasks.common.params import ParamsError
from tasks.common.redaction import without_secrets


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--experiment",
        action="store_true",
        help="first set experiment.recipes in params.yaml to these recipes; `all`: to every recipe",
    )
    flags.add_run(parser, concurrency=1, retries=0)


def run(options: argparse.Namespace) -> int:
    """Find the stale stages and run them. Return 0, or 1 if a stage failed. If all are up to date,
    Prefect is used only if PREFECT_API_URL names a server that responds."""
    request, experiment = flags.request_of(options), []
    if options.experiment:
        if not request.recipes:
            raise ParamsError("--experiment needs recipes, or `all`")
        request, experiment = replace(request, recipes=[]), request.recipes
    with opened(request, experiment) as stages:
        if stages.left_out:
            print(summary.left_out(stages), flush=True)
        place = summary.prefect_place()
        named = server.named_url()
        if not stages.idle or (named and server.answers(named)):
            failure = run_flow(stages, request)
            if failure:
                print(summary.failed(failure), file=sys.stderr)
                return 1
        print(f"{summary.conclusion(stages)}\n", flush=True)
    shown = summary.places(stages.root, is_stale="report" in stages.left_out)
    print(f"{shown}\nPrefect   {place}", flush=True)
    return 0


def run_flow(stages: Stages, request: FlowRequest) -> str:
    """Run the flow over the stages. Return its error message, or an empty string;
    raise KeyboardInterrupt if interrupted. Import Prefect only here: that takes two seconds."""
    from httpx import HTTPError
    from prefect.exceptions import TerminationSignal

    from flows.pipeline import records
    from flows.pipeline.flow import PipelineError, flow_over

    try:
        server.provide()
        flow = flow_over(lambda _: nullcontext(stages))
        shown = list(map(without_secrets, request.overrides))  # Prefect only records them
        flow(**asdict(replace(request, overrides=shown)))
    except (PipelineError, server.ServerError) as error:
        return str(error)
    except (HTTPError, RuntimeError) as error:
        if not isinstance(error, HTTPError) and not isinstance(error.__cause__, HTTPError):
            raise
        return server.lost(error)
    except (KeyboardInterrupt, TerminationSignal) as error:
        if records.cancelled:
            records.attempt(records.end_cancelled)
        raise KeyboardInterrupt from error
    return ""
