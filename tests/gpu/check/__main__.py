"""python -m tests.gpu.check --out DIR [--minutes 10]: measure Winnow's parts on this machine's GPU.

Every part runs in a separate process, and writes `DIR/PART.json` when it ends. `DIR/page.md`
contains all results so far. A part with a result is not run again: the same command continues a
check that ran out of minutes or was killed. A part that failed has a log in `DIR/PART.log`, and is
run again. The check needs no network: weights are random, at real shapes, or made here, or in an
installed package. Without a GPU, or with `--small`, all parts are small and run on the CPU, to test
the check itself."""

import argparse
import importlib
import json
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from tasks.common.files import replace_file
from tests.files import PROJECT
from tests.gpu.check.page import page

PARTS = ("environment", "engine", "vllm", "update", "device_time", "variants", "training", "larger")
PARTS += ("smollm2",)  # needs the package of requirements/smollm2.txt


def run_part(name: str, out: Path, seconds: float, *, small: bool) -> str:
    """Run a part for at most `seconds`. Return its outcome in words."""
    command = [sys.executable, "-m", "tests.gpu.check.part", name, str(out / f"{name}.json")]
    with (out / f"{name}.log").open("wb") as log:
        try:
            done = subprocess.run(
                [*command, *(["--small"] if small else [])],
                cwd=PROJECT,
                stdout=log,
                stderr=subprocess.STDOUT,
                timeout=seconds,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return "ran out of time"
    return "done" if done.returncode == 0 else f"failed, see {log.name}"


def results(out: Path) -> dict[str, Any]:
    """Return the results of all parts so far. Ignore invalid files."""
    found = {}
    for name in PARTS:
        with suppress(OSError, ValueError, KeyError, TypeError):
            result = json.loads((out / f"{name}.json").read_text())
            found[name] = {key: result[key] for key in ("rows", "seconds", "is_small")}
    return found


def write_page(out: Path) -> None:
    """Write the page of all results so far."""
    text = page(results(out))
    replace_file(out / "page.md", lambda file: file.write(text.encode()))


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="a folder, which is created")
    parser.add_argument("--minutes", type=float, default=10.0, help="for all parts together")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--small", action="store_true", help="small sizes, on the CPU")
    options = parser.parse_args()
    small = options.small or not importlib.import_module("torch").cuda.is_available()
    out: Path = options.out.absolute()
    out.mkdir(parents=True, exist_ok=True)
    deadline, outcomes = time.monotonic() + 60.0 * options.minutes, {}
    for name in options.parts:
        if name in results(out):
            outcomes[name] = "was there"
        elif (left := deadline - time.monotonic()) <= 0:
            outcomes[name] = "no time left"
        else:
            outcomes[name] = run_part(name, out, left, small=small)
        print(f"{name}: {outcomes[name]}", flush=True)
        write_page(out)
    return 0 if set(outcomes.values()) <= {"done", "was there"} else 1


if __name__ == "__main__":
    sys.exit(main())
