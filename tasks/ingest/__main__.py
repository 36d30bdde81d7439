"""python -m tasks.ingest [--dry-run]: read prompts from their sources."""

import argparse

from tasks.common.processes import ending


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--dry-run", action="store_true", help="print what would be kept and dropped, write nothing"
    )


if __name__ == "__main__":
    ending.begin_stage()
    from tasks.common import stage

    stage.run("tasks.ingest.run", options=add_options)
