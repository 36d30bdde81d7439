"""Whole runs of the stage `train` with the embedded policy in float32: `grpo`, `winnow`, and `grpo`
killed and continued. A GPU may round differently in another order, so equal weights are reported
and not required."""

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import yaml

from tasks.common.accounting.ledger import ACCOUNTS
from tasks.common.artifacts import CURVE, Layout
from tasks.common.checksums import read_checked
from tests.bench.world import PROJECT, RECIPES, make_world
from tests.gpu.check.shapes import Sizes


def rows(sizes: Sizes) -> Iterator[dict[str, Any]]:
    grpo, winnow = RECIPES.values()
    with tempfile.TemporaryDirectory() as folder:
        layout = make_world(Path(folder), steps=8 if sizes.is_small else 96)
        values = yaml.safe_load((layout.root / "params.yaml").read_text())
        values["engine"] |= {"device": sizes.device.type}
        values["checkpoint"] |= {"every_seconds": 0.0}
        values["recipes"]["killed"] = values["recipes"][grpo]
        (layout.root / "params.yaml").write_text(yaml.safe_dump(values))
        shutil.copytree(layout.plan(grpo, 0), layout.plan("killed", 0))
        for name, recipe, kills in (
            ("grpo", grpo, 0),
            ("grpo, killed", "killed", 2),
            ("winnow", winnow, 0),
        ):
            yield train(layout, name, recipe, kills, grpo)


def train(layout: Layout, name: str, recipe: str, kills: int, same: str) -> dict[str, Any]:
    """Train, with so many kills, and compare the weights with those of the recipe `same`."""
    stage = ["tasks.train", "--recipe", recipe, "--seed", "0"]
    seconds, kills = run_stage(layout, stage, kills, lambda: checkpoints(layout))
    out = layout.train(recipe, 0)
    flops = read_checked(out / "flops.json")
    accuracy = CURVE.read(out / "curve.parquet")["accuracy"]
    digests = [read_checked(layout.trained_card(each, 0))["digest"] for each in (same, recipe)]
    return {
        "run": name,
        "kills": kills,
        "seconds": seconds,
        "rollouts": flops["rollouts"]["generate"],
        **{f"{account}, TFLOPs": sum(flops[account].values()) / 1e12 for account in ACCOUNTS},
        "validation accuracy before": float(accuracy[0]),
        "after": float(accuracy[-1]),
        "weights of an unkilled run": digests[0] == digests[1] if kills else None,
    }


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
