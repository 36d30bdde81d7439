"""Fifty kills: a profile that is SIGKILLed at random moments ends as one that was left alone.

    python -m tests.bench.profile_kills [--kills 50] [--batch 128] [--seed 0]

Profiles 1,000 prompts with the embedded policy, eight samples each: once undisturbed, once killed
again and again, at start-up, while sampling, while storing. Prints the share of rollouts that was
sampled in excess, and the seconds and tokens of a second, unchanged run; fails unless profile and
rollouts are equal, row for row.

A kill loses the batch in hand, on average half of it: the excess is about kills x batch / 2 of the
8,000 rollouts. What was in the decoder's slots at a kill counts as lost whole, though it was not
finished: the share is an upper bound."""

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import yaml

from tasks.common.artifacts import PROFILE, PROMPTS, ROLLOUTS, Layout
from tasks.common.sealed import read_sealed
from tests.bench.world import PROJECT, parameters

NUM_PROMPTS, NUM_SAMPLES = 1000, 8
RUN = (
    "import tasks.engines as engines, runpy; engines.__path__.append({folder!r}); "
    "runpy.run_module('tasks.profile', run_name='__main__')"
)


def make_root(root: Path, prompts: Any, batch: int) -> Layout:
    """A data root with the embedded policy and `prompts`, whose engine counts."""
    layout = Layout(root)
    PROMPTS.write(layout.prompts("train"), prompts)
    shutil.copytree(PROJECT / "data" / "policy", layout.policy)
    shutil.copy(PROJECT / "data" / "policy.json", layout.policy_card)
    values = parameters(32)
    values["engine"]["name"] = "counting"
    values["store"]["batch_rollouts"] = batch
    values["profile"]["num_samples"] = NUM_SAMPLES
    (root / "params.yaml").write_text(yaml.safe_dump(values))
    return layout


def make_prompts(root: Path) -> Any:
    values = parameters(32)
    root.mkdir()
    (root / "params.yaml").write_text(yaml.safe_dump(values))
    line = [
        sys.executable,
        "-m",
        "tasks.ingest",
        "--params",
        str(root / "params.yaml"),
        "--data",
        str(root),
    ]
    subprocess.run(line, check=True, stderr=subprocess.DEVNULL, cwd=PROJECT)
    return PROMPTS.read(Layout(root).prompts("train")).head(NUM_PROMPTS)


def start(layout: Layout) -> "subprocess.Popen[bytes]":
    code = RUN.format(folder=str(Path(__file__).parent / "engines"))
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "WINNOW_COUNTS": str(layout.root / "counts.txt"),
    }
    line = [
        sys.executable,
        "-c",
        code,
        "--params",
        str(layout.root / "params.yaml"),
        "--data",
        str(layout.root),
    ]
    return subprocess.Popen(line, stderr=subprocess.DEVNULL, env=environment, cwd=PROJECT)


def counts(layout: Layout) -> list[tuple[str, int]]:
    path = layout.root / "counts.txt"
    lines = path.read_text().splitlines() if path.exists() else []
    return [(line.split()[0], int(line.split()[1])) for line in lines]


def timed(layout: Layout) -> float:
    started = time.perf_counter()
    assert start(layout).wait() == 0
    return time.perf_counter() - started


def num_done(layout: Layout) -> int:
    return sum(number for what, number in counts(layout) if what == "done")


def kill_once(layout: Layout, rng: random.Random, kills: int) -> bool:
    """Start the stage and kill it: one time in five while it starts, else after some rollouts more,
    on average so many that `kills` of it are half of all. True when it had finished."""
    process, started = start(layout), time.perf_counter()
    early, target = (
        rng.random() < 0.2,
        num_done(layout) + rng.uniform(0.0, NUM_PROMPTS * NUM_SAMPLES / kills),
    )
    patience = rng.uniform(0.0, 3.0) if early else 120.0
    while (
        process.poll() is None
        and time.perf_counter() - started < patience
        and num_done(layout) < target
    ):
        time.sleep(0.005)
    time.sleep(rng.uniform(0.0, 0.1))
    process.send_signal(signal.SIGKILL)
    return process.wait() == 0


def handed_out(layout: Layout, max_rows: int) -> int:
    """Rollouts finished, and those that at most were in the decoder's slots when it was killed."""
    total = inside = 0
    for what, number in [*counts(layout), ("handed", 0)]:
        if what == "done":
            total, inside = total + number, inside - number
        else:
            total, inside = total + min(inside, max_rows), number
    return total


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=50)
    parser.add_argument("--batch", type=int, default=128, help="store.batch_rollouts")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    with tempfile.TemporaryDirectory() as folder:
        prompts = make_prompts(Path(folder) / "prompts")
        alone, killed = (
            make_root(Path(folder) / name, prompts, options.batch) for name in ("alone", "killed")
        )
        cold, warm = timed(alone), timed(alone)
        sampling = read_sealed(alone.profile / "cost.json")["seconds"]["profile"]
        print(f"undisturbed: {cold:.1f} s, of which sampling {sampling:.1f} s", flush=True)
        print(
            f"again, unchanged: {warm:.1f} s; "
            f"{read_sealed(alone.sampling_note('profile'))['sampled']['said']}",
            flush=True,
        )
        started = time.perf_counter()
        for number in range(options.kills):
            if kill_once(killed, rng, options.kills):
                sys.exit(f"the profile was done after {number} kills: aim them better")
        print(f"{options.kills} kills in {time.perf_counter() - started:.0f} s", flush=True)
        timed(killed)
        print(f"then: {read_sealed(killed.sampling_note('profile'))['sampled']['said']}")
        wanted = NUM_PROMPTS * NUM_SAMPLES
        excess = handed_out(killed, parameters(32)["engine"]["max_rows"]) / wanted - 1
        equal = all(
            table.read(alone.profile / name).equals(table.read(killed.profile / name))
            for table, name in ((PROFILE, "profile.parquet"), (ROLLOUTS, "rollouts.parquet"))
        )
    print(f"sampled in excess: at most {excess:.1%} of {wanted:,} rollouts")
    print(f"profile and rollouts equal, row for row: {equal}")
    sys.exit(0 if equal else 1)


if __name__ == "__main__":
    main()
