"""python -m tasks.report: compare results and costs of all recipes and seeds."""

import argparse

from tasks.common.processes import ending


def options(parser: argparse.ArgumentParser) -> None:
    words = "write only the page, of these cells (recipe/seed), and record nothing"
    parser.add_argument("--cells", nargs="+", default=[], help=words)


if __name__ == "__main__":
    ending.begin_stage()
    from tasks.common import stage

    stage.run("tasks.report.run", options=options)
