"""Whole runs of the stage `train` with the embedded policy in float32: `grpo`, `winnow`, and `grpo`
killed and continued. A GPU may round differently in another order, so equal weights are reported
and not required."""

import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import yaml

from tasks.common.artifacts import CURVE, Layout
from tasks.common.checksums import read_checked
from tests.bench.world import PROJECT, RECIPES, make_world
from tests.gpu.check.shapes import Sizes

KILLS = 2


def rows(sizes: Sizes) -> Iterator[dict[str, Any]]:
    steps = 8 if sizes.is_small else 96
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
            seconds, kills = run(layout, recipe, kills)
            out = layout.train(recipe, 0)
            digests[name] = read_checked(out / "policy.json")["digest"]
            flops = read_checked(out / "flops.json")
            yield {
                "run": name,
                "kills": kills,
                "seconds": seconds,
                "rollouts": flops["rollouts"]["generate"],
                "charged, TFLOPs": sum(flops["charged"].values()) / 1e12,
                "validation accuracy": float(CURVE.read(out / "curve.parquet")["accuracy"][-1]),
                "weights of an unkilled run": digests[name] == digests["grpo"] if kills else None,
            }


def run(layout: Layout, recipe: str, kills: int) -> tuple[float, int]:
    """Run a training, see `run_stage`."""
    stage = ["tasks.train", "--recipe", recipe, "--seed", "0"]
    return run_stage(layout, stage, kills, lambda: checkpoints(layout))


def run_stage(
    layout: Layout, stage: list[str], kills: int = 0, saved: Callable[[], Collection[Any]] = tuple
) -> tuple[float, int]:
    """Run a stage, and kill it up to `kills` times, each time after something new is `saved`.
    Return its seconds and the number of kills. Raise RuntimeError with the end of its log if it
    fails."""
    paths = ["--params", str(layout.root / "params.yaml"), "--data", str(layout.root)]
    log, started = layout.root / f"{stage[0]}.log", time.perf_counter()
    for number in range(kills + 1):
        before, is_killed = set(saved()), False
        with log.open("ab") as file:
            command = [sys.executable, "-m", *stage, *paths]
            process = subprocess.Popen(command, cwd=PROJECT, stdout=file, stderr=file)
        while number < kills and process.poll() is None:
            if set(saved()) - before:
                process.kill()
                is_killed = True
                break
            time.sleep(0.01)
        if process.wait() == 0:
            break
        if not is_killed:
            raise RuntimeError(log.read_text(errors="replace")[-2000:])
    return time.perf_counter() - started, number


def checkpoints(layout: Layout) -> set[Path]:
    return set(layout.checkpoints.glob("*/step-*"))
