"""The pipeline on a schedule, for as long as this process runs.

    python -m flows.serve [--cron "0 3 * * *"] [--every SECONDS] [--force ingest] [--recipe ...]
    [--seed ...]

Needs a Prefect server that lasts: `prefect server start`, and its address in PREFECT_API_URL (or in
the profile, by `prefect config set`). Runs do not overlap: one that falls due while another runs
waits for it. `--force ingest` reads the sources anew every time; where they hold nothing new,
everything after ingest is cached."""

import argparse
import os
import sys

from prefect.settings import PREFECT_API_URL

from flows import commands
from flows.flow import pipeline

NO_SERVER = """a schedule needs a Prefect server that outlives a run:
    prefect server start
    prefect config set PREFECT_API_URL=http://127.0.0.1:4200/api"""


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m flows.serve", description="Run the pipeline on a schedule."
    )
    when = parser.add_mutually_exclusive_group()
    when.add_argument(
        "--cron", default="0 3 * * *", help="when, as cron has it (default: %(default)s)"
    )
    when.add_argument("--every", type=float, metavar="SECONDS", help="an interval instead")
    parser.add_argument("--recipe", action="append", help="only this recipe (may be repeated)")
    parser.add_argument(
        "--seed", action="append", type=int, help="only this seed (may be repeated)"
    )
    parser.add_argument(
        "--force", action="append", metavar="STAGE", help="run this stage although nothing changed"
    )
    parser.add_argument(
        "--retries", type=int, default=0, help="how often a failed stage is tried again"
    )
    return parser.parse_args(arguments)


def main() -> int:
    """Serve until interrupted; 1 when there is no server to be scheduled by."""
    options = parse()
    if not PREFECT_API_URL.value():
        print(NO_SERVER, file=sys.stderr)
        return 1
    os.chdir(commands.ROOT)
    pipeline.serve(
        name="scheduled",
        cron=None if options.every else options.cron,
        interval=options.every,
        parameters={
            "recipes": options.recipe,
            "seeds": options.seed,
            "force": options.force,
            "retries": options.retries,
        },
        limit=1,
        pause_on_shutdown=False,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
