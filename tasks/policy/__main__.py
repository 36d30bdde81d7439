"""python -m tasks.policy: make or fetch the initial policy."""

import argparse

from tasks.common import parent


def options(parser: argparse.ArgumentParser) -> None:
    """Options of this stage alone."""
    parser.add_argument(
        "--copy",
        action="store_true",
        help="copy the weights of an external policy: the data root then needs its folder no more",
    )


if __name__ == "__main__":
    parent.die_with_parent()
    from tasks.common import stage

    stage.run("tasks.policy.run", options=options)
