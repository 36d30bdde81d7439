"""Offer this machine to a work pool: it runs the stages that other machines send.

    python -m flows.worker --pool gpu-pool

Needs the Prefect server of the senders (PREFECT_API_URL) and a checkout that is the worker's own:
it is brought to each sender's commit. The pool and its deployment are made where they are missing.
Then this is Prefect's own worker, which runs one stage at a time until it is ended."""

import argparse
import os
import sys
from contextlib import suppress
from typing import NoReturn

from httpx import HTTPError
from prefect import get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.deployments.runner import RunnerDeployment
from prefect.exceptions import ObjectAlreadyExists
from prefect.settings import PREFECT_API_URL
from prefect.types.entrypoint import EntrypointType

from flows import commands, server
from flows.sent import run_stage

NO_SERVER = """a worker needs the Prefect server that the senders use:
    prefect config set PREFECT_API_URL=http://ADDRESS:4200/api"""


PROGRAM = sys.argv[0] if sys.argv[0].startswith("winnow ") else "python -m flows.worker"


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog=PROGRAM, description="Run the stages that other machines send to a work pool."
    )
    parser.add_argument("--pool", required=True, help="the work pool")
    return parser.parse_args(arguments)


def register(pool: str) -> None:
    """Make the pool, where it is missing, and its deployment. The flow is named as a module: each
    worker imports it from its own checkout."""
    with get_client(sync_client=True) as client, suppress(ObjectAlreadyExists):
        client.create_work_pool(WorkPoolCreate(name=pool, type="process"))
    RunnerDeployment.from_flow(
        run_stage, name=pool, work_pool_name=pool, entrypoint_type=EntrypointType.MODULE_PATH
    ).apply()


def main() -> int:
    """Become the worker; 1 where there is no server, or none that takes its registration."""
    options, url, why = parse(), PREFECT_API_URL.value(), NO_SERVER
    if url:
        server.warn_if_open(url)
        os.chdir(commands.ROOT)
        try:
            register(options.pool)
            become(options.pool)
        except HTTPError as error:
            why = server.lost(error)
    print(why, file=sys.stderr)
    return 1


def become(pool: str) -> NoReturn:
    """Be Prefect's worker from now on, whose flow runs import this checkout."""
    paths = [str(commands.ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**commands.environment(), "PYTHONPATH": os.pathsep.join(paths)}
    worker = ("worker", "start", "--pool", pool, "--type", "process", "--limit", "1")
    os.execve(sys.executable, [sys.executable, "-m", "prefect", *worker], environment)


if __name__ == "__main__":
    sys.exit(main())
