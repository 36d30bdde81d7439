"""The command line: replay pending records."""

import argparse
import sys
from pathlib import Path

from tasks.common.tracking import replay


def main() -> None:
    """The command line: replay pending records."""
    parser = argparse.ArgumentParser(prog="python -m tasks.common.tracking")
    command = parser.add_subparsers(required=True).add_parser(
        "replay", help="write pending records to a server"
    )
    command.add_argument("files", type=Path, nargs="+", metavar="FILE")
    command.add_argument("--uri", required=True, help="http://..., or sqlite:///PATH")
    arguments = parser.parse_args()
    for path in arguments.files:
        try:
            print(f"{path} is run {replay(path, arguments.uri)} at {arguments.uri}")
        except (ValueError, OSError) as error:
            sys.exit(str(error))


if __name__ == "__main__":
    main()
