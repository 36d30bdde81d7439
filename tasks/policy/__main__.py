"""python -m tasks.policy: make or fetch the initial policy."""

import argparse

from tasks.common.processes import ending


def options(parser: argparse.ArgumentParser) -> None:
    """Add the options of this stage."""
    parser.add_argument(
        "--copy",
        action="store_true",
        help="copy the weights of an external policy, so its folder is no longer needed",
    )


if __name__ == "__main__":
    ending.begin_stage()
    from tasks.common import stage

    stage.run("tasks.policy.run", options=options)
