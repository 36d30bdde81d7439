"""The pipeline on a schedule, for as long as this process runs.

    python -m flows.serve [--cron "0 3 * * *"] [--every SECONDS] [--force ingest] [--recipe ...]
    [--seed ...] [--rounds 2 [--from sgpo/0]] [--data other] [--concurrency N] [KEY=VALUE ...]

What is not asked for here is as prefect.yaml says. Needs a Prefect server that lasts: `winnow ui`,
and its address in PREFECT_API_URL (or in the profile, by `prefect config set`). Runs do not
overlap: one that falls due while another runs waits for it. `--force ingest` reads the sources anew
every time; where they hold nothing new, everything after ingest is cached. KEY=VALUE may be what
may come through the server: numbers, recipes and seeds.

An interrupt or SIGTERM cancels the run that is going on: its stage saves what it has, and the next
run goes on from there. Of a machine that died, an automation of the server marks the run as crashed
when it has sent no heartbeat for a while."""

import argparse
import asyncio
import logging
import os
import signal
import sys
from datetime import timedelta
from typing import Any, cast

from httpx import HTTPError
from prefect.automations import Automation
from prefect.client.schemas.objects import ConcurrencyLimitConfig, StateType
from prefect.events.actions import ChangeFlowRunState
from prefect.events.schemas.automations import EventTrigger, Posture
from prefect.events.schemas.events import ResourceSpecification
from prefect.runner import Runner
from prefect.settings import PREFECT_API_URL

from flows import (
    HEARTBEAT_SECONDS,
    commands,
    crashes,
    overrides,
    records,
    rounds,
    selection,
    server,
    side_by_side,
)
from flows.flow import pipeline
from tasks.common import params, process

logger = logging.getLogger(__name__)

NO_SERVER = """a schedule needs a Prefect server that outlives a run:
    winnow ui
    prefect config set PREFECT_API_URL=http://127.0.0.1:4200/api"""
AUTOMATION = "winnow: runs without a heartbeat have crashed"
ENDED = ("Completed", "Failed", "Cancelled", "Crashed")


class Served(Runner):
    """A runner that cancels its run before it ends. Prefect's own handler of SIGTERM waits, inside
    its event loop, for that loop, and leaves the run as it is."""

    def handle_sigterm(self, *_: Any, **__: Any) -> None:
        """Cancel what runs, then leave `start`; once, however often it is asked."""
        if self.stopping:
            return
        if not self.started:
            raise KeyboardInterrupt
        loop = asyncio.get_running_loop()
        loop.call_soon_threadsafe(lambda: loop.create_task(self.astop()))


def definition() -> dict[str, Any]:
    """The deployment in prefect.yaml, which this one shares."""
    (found,) = params.load(commands.ROOT / "prefect.yaml")["deployments"]
    return dict(found)


PROGRAM = sys.argv[0] if sys.argv[0].startswith("winnow ") else "python -m flows.serve"


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    shared = definition()
    parameters, schedule = shared["parameters"], shared["schedules"][0]
    parser = argparse.ArgumentParser(prog=PROGRAM, description="Run the pipeline on a schedule.")
    when = parser.add_mutually_exclusive_group()
    when.add_argument(
        "--cron", default=schedule["cron"], help="when, as cron has it (default: %(default)s)"
    )
    when.add_argument("--every", type=float, metavar="SECONDS", help="an interval instead")
    selection.add_options(parser)
    parser.add_argument(
        "--retries",
        type=int,
        default=parameters["retries"],
        help="how often a failed stage is tried again (default: %(default)s)",
    )
    rounds.add_options(parser)
    side_by_side.add_options(parser, parameters["concurrency"])
    parser.add_argument(
        "overrides", nargs="*", metavar="KEY=VALUE", help="values of params.yaml for these runs"
    )
    options = parser.parse_args(arguments)
    try:
        overrides.check_from_elsewhere(options.overrides)
    except params.ParamsError as error:
        parser.error(str(error))
    return options


async def serve(options: argparse.Namespace) -> None:
    """Register the deployment, and run what falls due until interrupted or terminated."""
    shared = definition()
    runner = Served(
        name=shared["name"], limit=1, pause_on_shutdown=False, heartbeat_seconds=HEARTBEAT_SECONDS
    )
    await runner.aadd_flow(
        pipeline,
        name=shared["name"],
        description=shared["description"],
        cron=None if options.every else options.cron,
        interval=options.every,
        concurrency_limit=ConcurrencyLimitConfig(**shared["concurrency_limit"]),
        parameters={
            "recipes": options.recipe,
            "seeds": options.seed,
            "force": options.force or shared["parameters"]["force"],
            "retries": options.retries,
            "overrides": options.overrides,
            "concurrency": options.concurrency,
            "data": options.data,
            "rounds": options.rounds,
            "starts": options.starts,
        },
    )
    signal.signal(signal.SIGINT, runner.handle_sigterm)
    print(
        f"serving winnow/{shared['name']}; a run now: prefect deployment run "
        f"winnow/{shared['name']}",
        flush=True,
    )
    await runner.start()


def watch_heartbeats() -> None:
    """Have the server mark runs as crashed that no longer send heartbeats."""
    ended = {f"prefect.flow-run.{state}" for state in ENDED}
    wanted = Automation(
        name=AUTOMATION,
        description="The machine or the process of the run is gone; the next run goes on.",
        trigger=EventTrigger(
            after={"prefect.flow-run.heartbeat"},
            expect={"prefect.flow-run.heartbeat", *ended},
            match=ResourceSpecification({"prefect.resource.id": ["prefect.flow-run.*"]}),
            match_related=ResourceSpecification(
                {"prefect.resource.role": "flow", "prefect.resource.name": pipeline.name}
            ),
            for_each={"prefect.resource.id"},
            posture=Posture.Proactive,
            threshold=1,
            within=timedelta(seconds=3 * HEARTBEAT_SECONDS),
        ),
        actions=[
            ChangeFlowRunState(
                name=None,
                state=StateType.CRASHED,
                message="No heartbeat: its machine or its process is gone.",
                force=False,
            )
        ],
    )
    try:
        there = cast(Automation, Automation.read(name=AUTOMATION))
    except ValueError:
        wanted.create()
        return
    wanted.id = there.id
    wanted.update()


def main() -> int:
    """Serve until interrupted; 1 when there is no server to be scheduled by."""
    options = parse()
    if not (url := PREFECT_API_URL.value()):
        print(NO_SERVER, file=sys.stderr)
        return 1
    server.warn_if_open(url)
    os.chdir(commands.ROOT)
    records.attempt(watch_heartbeats)
    records.attempt(crashes.mark)
    try:
        asyncio.run(serve(options))
    except KeyboardInterrupt:  # before anything was served
        return process.interrupted()
    except HTTPError as error:
        print(server.lost(error), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
