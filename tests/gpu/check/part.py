"""python -m tests.gpu.check.part NAME FILE [--small]: run one part, and write its rows to FILE when
it ends."""

import argparse
import importlib
import json
import shutil
import sys
import time
from pathlib import Path

from tasks.common.files import replace_file
from tasks.common.processes import ending
from tests.gpu.check.shapes import Sizes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name")
    parser.add_argument("out", type=Path, metavar="FILE")
    parser.add_argument("--small", action="store_true")
    measure(**vars(parser.parse_args()))
    return 0


def measure(name: str, out: Path, *, small: bool) -> None:
    """Run a part, and write its rows to `out`."""
    part = importlib.import_module(f"tests.gpu.check.parts.{name}")
    started, rows = time.perf_counter(), []
    folder = out.with_suffix(".small" if small else ".unfinished")
    for row in part.rows(Sizes(small, folder)):
        rows.append(row)
        print(json.dumps(row), flush=True)
    seconds = round(time.perf_counter() - started, 1)
    found = {"rows": rows, "seconds": seconds, "is_small": small}
    replace_file(out, lambda file: file.write(json.dumps(found, indent=1).encode()))
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    ending.die_with_parent()  # the next check must not find a part that still runs
    sys.exit(main())
