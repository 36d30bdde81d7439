"""python -m tasks.report: compare what all recipes and seeds reached and cost."""

import argparse
from pathlib import Path

from tasks.common import parent


def options(parser: argparse.ArgumentParser) -> None:
    """Options of this stage alone."""
    parser.add_argument(
        "--before",
        type=Path,
        action="append",
        default=[],
        metavar="DIR",
        help="the data root of an earlier round, the first round's first (may be repeated)",
    )


if __name__ == "__main__":
    parent.die_with_parent()
    from tasks.common import stage

    stage.run("tasks.report.run", options=options)
