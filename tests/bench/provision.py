"""What more groups in flight than a step takes save: the seconds and the decode steps of sampling
at `over_provision` 1, 1.5 and 2.

    python -m tests.bench.provision [--steps 48] [--repeats 5] [--rollouts 64] [--out FILE]

The embedded policy learns in this process and samples by the engine `hf`, whose rows are as many as
a step's rollouts, so that a step ends with few of them in flight. A decode step gives every row in
flight a token. On a GPU it takes about as long for few rows as for many, so the ratio of decode
steps is what a GPU would save at most, and that of seconds what this machine saves. Runs of the
compared factors alternate; medians, and ratios within one repeat. All take the same number of steps
and rollouts.
"""

import json
import statistics
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

from tasks.engines.hf.decoding import Slots
from tasks.engines.hf.engine import HfEngine
from tasks.train.checkpoint.checkpoints import Checkpoints
from tasks.train.loop.loop import train
from tasks.train.settings import CheckpointSettings
from tests.bench.side_winnow import bench_trainer
from tests.bench.world import NEVER, compare_in_world, ratios

FACTORS = (1.0, 1.5, 2.0)


def run(root: Path, steps: int, rollouts: int, factor: float) -> dict[str, float]:
    """What sampling took in a run of `steps` steps."""
    limit = 0 if factor == 1.0 else 1
    trainer = bench_trainer(root, 0, max_staleness=limit, over_provision=factor, max_steps=steps)
    engine, state = trainer.collector.engine, trainer.state
    if not isinstance(engine, HfEngine):
        raise RuntimeError(f"the benchmark counts the decode steps of hf, not of {engine.name}")
    engine.max_rows, num_decoded, decode = rollouts, 0, Slots.step

    def counted(slots: Slots) -> None:
        nonlocal num_decoded
        num_decoded += state.part == "generate"
        decode(slots)

    ages: list[float] = []

    def record(values: Any, *_: Any) -> None:
        ages.append(values.get("staleness_mean", 0.0))

    Slots.step = counted  # type: ignore[method-assign]
    try:
        with tempfile.TemporaryDirectory() as folder, closing(trainer.collector.grader) as grader:
            grader.grader.started(set(trainer.prompts.table["verifier"]))
            checkpoints = Checkpoints(Path(folder), {"recipe": "bench", "seed": 0}, 1)
            train(trainer, checkpoints, CheckpointSettings(NEVER, 1), record)
    finally:
        Slots.step = decode  # type: ignore[method-assign]
    tokens = sum(row["completion_tokens_mean"] * row["num_rollouts"] for row in state.steps)
    return {
        "seconds": state.seconds["generate"],
        "decode_steps": float(num_decoded),
        "tokens": tokens,
        "rollouts": float(sum(row["num_rollouts"] for row in state.steps)),
        "staleness_mean": statistics.mean(ages),
    }


def compare(root: Path, steps: int, repeats: int, rollouts: int) -> list[dict[str, float]]:
    """A row for every factor; seconds and decode steps are of a token that is learned from."""
    found: dict[float, list[dict[str, float]]] = {factor: [] for factor in FACTORS}
    for repeat in range(repeats):
        first = repeat % len(FACTORS)
        for factor in FACTORS[first:] + FACTORS[:first]:
            found[factor].append(run(root, steps, rollouts, factor))
    rows = []
    for factor, runs in found.items():
        row = {"over_provision": factor, **runs[0], "seconds": median(runs, "seconds")}
        for name in ("seconds", "decode_steps"):
            row |= ratios(f"{name}_ratio", a_token(runs, name), a_token(found[1.0], name))
        print(json.dumps(row), flush=True)
        rows.append(row)
    return rows


def a_token(runs: list[dict[str, float]], name: str) -> list[float]:
    return [run[name] / run["tokens"] for run in runs]


def median(runs: list[dict[str, float]], name: str) -> float:
    return statistics.median(run[name] for run in runs)


if __name__ == "__main__":
    compare_in_world(__doc__, compare, steps=48, repeats=5, rollouts=64)
