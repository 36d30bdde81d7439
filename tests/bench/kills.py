"""Fifty kills: a training run that is SIGKILLed at random moments ends as one that was left alone.

    python -m tests.bench.kills [--kills 50] [--seed 0]

Trains the small world of the tests twice: once undisturbed, once killed again and again at random
times, alternately the trainer itself and a parent process that had started it (as `dvc` does).
Prints what the kills cost, and fails unless policy, steps, curve and rollouts are equal to the last
bit."""

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil

from tasks.common.artifacts import Layout
from tasks.common.sealed import read_sealed
from tests.policies import make_guesser
from tests.train.worlds import make_world, outputs

SIZES = [4, 3, 4, 1, 2, 2, 6, 3, 5, 2, 4, 4]
PARENT = "import subprocess, sys; sys.exit(subprocess.run(sys.argv[1:]).returncode)"


def command(layout: Layout) -> list[str]:
    """The stage, as a user runs it."""
    root = layout.root
    line = [
        sys.executable,
        "-m",
        "tasks.train",
        "--params",
        str(root / "params.yaml"),
        "--data",
        str(root),
    ]
    return [*line, "--recipe", "r", "--seed", "0"]


def run(layout: Layout, seconds: float | None, through_parent: bool) -> bool:
    """Start the stage and kill it, or its parent, after `seconds`. True when it finished before
    that."""
    line = [sys.executable, "-c", PARENT, *command(layout)] if through_parent else command(layout)
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        **({"DVC_STAGE": "train"} if through_parent else {}),
    }
    process = subprocess.Popen(
        line, stderr=subprocess.DEVNULL, env=environment, start_new_session=through_parent
    )
    children: list[psutil.Process] = []
    try:
        return process.wait(timeout=seconds) == 0
    except subprocess.TimeoutExpired:
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signal.SIGKILL)
        process.wait()
        return False
    finally:
        _, alive = psutil.wait_procs(
            children, timeout=20
        )  # one that still imports ends as soon as it has
        if alive:
            sys.exit(f"processes outlived their killed parent: {alive}")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as folder:
        policy = make_guesser(Path(folder) / "policy")
        alone, killed = (
            make_world(Path(folder) / name, policy, SIZES * 600) for name in ("alone", "killed")
        )
        started = time.perf_counter()
        assert run(alone, None, through_parent=False)
        undisturbed = time.perf_counter() - started
        started = time.perf_counter()
        subprocess.run([*command(alone), "--help"], check=True, stdout=subprocess.DEVNULL)
        start_up = time.perf_counter() - started
        kills, started = 0, time.perf_counter()
        while kills < options.kills:
            # from within the start of the process to well into the steps it can reach
            if run(killed, rng.uniform(0.1, 1.6) * start_up, through_parent=kills % 2 == 1):
                sys.exit(f"the run finished after {kills} kills: make it longer")
            kills += 1
        steps = [path.name for path in sorted(killed.checkpoints.glob("*/step-*"))]
        print(
            f"{kills} kills in {time.perf_counter() - started:.0f} s; newest checkpoint: "
            f"{steps[-1:] or 'none'}"
        )
        assert run(killed, None, through_parent=False)
        lost, equal = (
            read_sealed(killed.train("r", 0) / "cost.json")["lost"],
            outputs(alone) == outputs(killed),
        )
        executed = read_sealed(killed.train("r", 0) / "flops.json")["executed"]["total"]
    print(
        f"undisturbed: {undisturbed:.1f} s; lost to kills: {lost['flops'] / executed:.1%} of the "
        "run's FLOPs"
    )
    print(f"outputs equal to the last bit: {equal}")
    sys.exit(0 if equal else 1)


if __name__ == "__main__":
    main()
