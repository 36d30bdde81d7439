"""Time stages from command to exit, alone and as forks of a flow's process.

    python -m tests.bench.stage_start DATA_ROOT [--repeat 3] [--stages report]

Run the pipeline first: with a full store a stage has almost nothing to do. Prints medians."""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from flows.pipeline.commands import launcher
from tasks.common.code import ROOT
from tasks.common.processes.forks import ADDRESS

STAGES = {
    "evaluate": ["tasks.evaluate"],
    "profile": ["tasks.profile"],
    "allocate": ["tasks.allocate", "--recipe", "grpo", "--seed", "0"],
    "report": ["tasks.report"],
}


def seconds(command: list[str], data: Path, environment: dict[str, str]) -> float:
    """Return the seconds to exit. Raises CalledProcessError with the stage's output if it fails."""
    places = ["--params", str(data.parent / "params.yaml"), "--data", str(data)]
    started = time.perf_counter()
    line = [sys.executable, "-m", *command, *places]
    subprocess.run(line, cwd=ROOT, env=environment, check=True, capture_output=True)
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench.stage_start")
    parser.add_argument("data", type=Path, help="the data root of a finished run")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES))
    options = parser.parse_args()
    data = options.data.resolve()
    with tempfile.TemporaryDirectory() as folder:
        address = f"{folder}/forks"
        server = subprocess.Popen(launcher("forks", address), cwd=ROOT)
        while not Path(address).exists():
            time.sleep(0.05)
        alone = {**os.environ, "OMP_NUM_THREADS": "1"}
        forked = {**alone, ADDRESS: address}
        first, *_ = options.stages
        seconds(STAGES[first], data, forked)  # the server imports its libraries
        for name in options.stages:
            times = {
                kind: statistics.median(
                    seconds(STAGES[name], data, environment) for _ in range(options.repeat)
                )
                for kind, environment in (("alone", alone), ("forked", forked))
            }
            print(f"{name:9} alone {times['alone']:5.2f} s   forked {times['forked']:5.2f} s")
        server.kill()
        server.wait()


if __name__ == "__main__":
    main()
