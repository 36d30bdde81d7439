"""The pipeline on a schedule, for as long as this process runs.

The schedule runs on the Prefect server that PREFECT_API_URL or the profile names, so on a server
of another machine, too. If none is named, it runs on the server of `winnow ui`. Flow, deployment
and automation have the name of the project's folder.
If no server responds, this process starts one on loopback and stops it at the end. Runs do
not overlap: a run that falls due during another run waits for it. `--force ingest` reads the
sources again every time; if they contain nothing new, everything after ingest is cached. `--set`
accepts the values that may come through the server: numbers, recipes and seeds.

An interrupt or SIGTERM cancels the current run: its stage saves its state, and the next run resumes
from it. If the machine dies, an automation of the server marks the run as crashed after some time
without a heartbeat."""

import argparse
import asyncio
import shlex
import signal
import sys
from contextlib import ExitStack
from dataclasses import asdict
from datetime import timedelta
from typing import Any, cast

from httpx import HTTPError
from prefect.automations import Automation
from prefect.client.schemas.objects import (
    ConcurrencyLimitConfig,
    ConcurrencyLimitStrategy,
    StateType,
)
from prefect.client.schemas.schedules import CronSchedule
from prefect.deployments.runner import DeploymentApplyError
from prefect.events.actions import ChangeFlowRunState
from prefect.events.schemas.automations import EventTrigger, Posture
from prefect.events.schemas.events import ResourceSpecification
from prefect.runner import Runner
from prefect.settings import PREFECT_API_URL, temporary_settings

from flows import HEARTBEAT_SECONDS
from flows.cli import flags
from flows.pipeline import commands, crashes, overrides, records, roots, summary
from flows.pipeline.flow import pipeline
from flows.serve import server

DEPLOYMENT = "refresh"
DESCRIPTION = "Bring the experiment up to date; read the sources again."
CRON = "0 3 * * *"  # in UTC
AUTOMATION = f"{commands.NAME}: runs without a heartbeat have crashed"
ENDED = ("Completed", "Failed", "Cancelled", "Crashed")


class Served(Runner):
    """A runner that cancels the current run before it exits. Prefect's own SIGTERM handler blocks
    the event loop that it waits for, and leaves the run's state unchanged."""

    def handle_sigterm(self, *_: Any, **__: Any) -> None:
        """Cancel the run and make `start` return; before `start`, raise KeyboardInterrupt."""
        if self.stopping:
            return
        if not self.started:
            raise KeyboardInterrupt
        loop = asyncio.get_running_loop()
        loop.call_soon_threadsafe(lambda: loop.create_task(self.astop()))


def add_options(parser: argparse.ArgumentParser) -> None:
    text = "cron expression (default: %(default)s)"
    parser.add_argument("--cron", type=cron, default=CRON, help=text)
    server.add_port(parser)
    flags.add_run(parser, concurrency=1, retries=1)


def cron(text: str) -> str:
    """Return the text if it is a valid cron expression, else raise ArgumentTypeError."""
    try:
        CronSchedule(cron=text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a cron expression: it must have five fields, such as '0 3 * * *'"
        ) from error
    return text


async def serve(options: argparse.Namespace) -> None:
    """Register the deployment, and start due runs until interrupted or terminated."""
    request, name = flags.request_of(options), f"{pipeline.name}/{DEPLOYMENT}"
    runner = Served(
        name=DEPLOYMENT, limit=1, pause_on_shutdown=False, heartbeat_seconds=HEARTBEAT_SECONDS
    )
    await runner.aadd_flow(
        pipeline,
        name=DEPLOYMENT,
        description=DESCRIPTION,
        tags=[pipeline.name],
        cron=options.cron,
        concurrency_limit=ConcurrencyLimitConfig(
            limit=1, collision_strategy=ConcurrencyLimitStrategy.ENQUEUE
        ),
        parameters={**asdict(request), "force": request.force or ["ingest"]},
    )
    signal.signal(signal.SIGINT, runner.handle_sigterm)
    command = shlex.join(["prefect", "deployment", "run", name])
    print(f"serving {name}; a run now: {command}", flush=True)
    await runner.start()


def watch_heartbeats() -> None:
    """Create or update the server's automation that marks runs without heartbeats as crashed."""
    ended = {f"prefect.flow-run.{state}" for state in ENDED}
    automation = Automation(
        name=AUTOMATION,
        description="The machine or the process of the run is gone; the next run resumes.",
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
        automation.create()
        return
    automation.id = there.id
    automation.update()


def run(options: argparse.Namespace) -> int:
    """Serve until interrupted. Return 1 if the server fails."""
    overrides.check_remote(options.overrides)
    roots.root_of(options.data)
    with ExitStack() as stack:
        pages = f"http://{server.HOST}:{options.prefect_port}/api"  # of `winnow ui`
        if not PREFECT_API_URL.value() and server.status(pages, "health") == 200:
            stack.enter_context(temporary_settings({PREFECT_API_URL: pages}))
        try:
            server.provide(options.prefect_port)
        except server.ServerError as error:
            print(error, file=sys.stderr)
            return 1
        print(f"Prefect   {summary.page_of(str(PREFECT_API_URL.value()))}", flush=True)
        records.attempt(watch_heartbeats)
        records.attempt(crashes.mark)
        try:
            asyncio.run(serve(options))
        except (HTTPError, DeploymentApplyError) as error:
            print(server.lost(error), file=sys.stderr)
            return 1
        return 0
