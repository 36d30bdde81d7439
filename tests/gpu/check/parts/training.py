"""Whole runs of the stage `train` with the embedded policy: `grpo` and `winnow` to their ends, and
`grpo` killed on the way and gone on with. In float32; what a GPU computes in another order may
round otherwise, so equal weights are reported and not required."""

import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from tasks.common.artifacts import CURVE, Layout
from tasks.common.sealed import read_sealed
from tests.bench.world import PROJECT, RECIPES, make_world
from tests.gpu.check.shapes import Sizes

KILLS = 2


def rows(sizes: Sizes) -> Iterator[dict[str, Any]]:
    steps = 8 if sizes.is_small else 256
    with tempfile.TemporaryDirectory() as folder:
        digests = {}
        for name, recipe, kills in (
            ("grpo", RECIPES["grpo"], 0),
            ("grpo, killed", RECIPES["grpo"], KILLS),
            ("winnow", RECIPES["winnow"], 0),
        ):
            layout = make_world(Path(folder) / name, steps=steps)
            values = yaml.safe_load((layout.root / "params.yaml").read_text())
            values["engine"] |= {"device": sizes.device.type}
            values["checkpoint"] |= {"every_seconds": 0.0}
            (layout.root / "params.yaml").write_text(yaml.safe_dump(values))
            seconds = run(layout, recipe, kills)
            out = layout.train(recipe, 0)
            digests[name] = read_sealed(out / "policy.json")["digest"]
            flops = read_sealed(out / "flops.json")
            yield {
                "run": name,
                "kills": kills,
                "seconds": seconds,
                "rollouts": flops["rollouts"]["generate"],
                "charged, TFLOPs": sum(flops["charged"].values()) / 1e12,
                "validation accuracy": float(CURVE.read(out / "curve.parquet")["accuracy"][-1]),
                "weights of an unkilled run": digests[name] == digests["grpo"] if kills else None,
            }


def run(layout: Layout, recipe: str, kills: int) -> float:
    """The seconds of a run, killed so many times after a checkpoint. Raises RuntimeError with the
    end of its log where it fails by itself."""
    paths = ["--params", str(layout.root / "params.yaml"), "--data", str(layout.root)]
    command = [sys.executable, "-m", "tasks.train", *paths, "--recipe", recipe, "--seed", "0"]
    log, started = layout.root / "train.log", time.perf_counter()
    for number in range(kills + 1):
        before = checkpoints(layout)
        with log.open("wb") as file:
            process = subprocess.Popen(command, cwd=PROJECT, stdout=file, stderr=file)
        while number < kills and process.poll() is None:
            if checkpoints(layout) - before:
                process.send_signal(signal.SIGKILL)
                break
            time.sleep(0.01)
        if process.wait() not in (0, -signal.SIGKILL):
            raise RuntimeError(log.read_text(errors="replace")[-2000:])
    return time.perf_counter() - started


def checkpoints(layout: Layout) -> set[Path]:
    return set(layout.checkpoints.glob("*/step-*"))
