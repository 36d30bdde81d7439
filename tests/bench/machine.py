"""Where the time of a step goes, against the machine's rate of large float32 matrix products, and
the update with torch.compile (dynamic shapes).

    python -m tests.bench.machine [--steps 40] [--rounds 3] [--no-large]

For the embedded policy and the large one of `tests.bench.world`, on one thread, with groups of 8
and 32 rollouts a step. The parts of a run are wall seconds, for idle cores, and executed FLOPs.
Eager and compiled updates read the same rollouts and alternate, A B A B; values are medians of the
CPU seconds of the working thread, which other jobs on the same cores disturb least."""

import argparse
import copy
import logging
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import torch

from tasks.common.artifacts import Layout
from tasks.train.checkpoint.checkpoints import Checkpoints
from tasks.train.data.rollouts import Rollouts
from tasks.train.loop.loop import train
from tasks.train.loop.trainer import Trainer
from tasks.train.settings import CheckpointSettings
from tests.bench.side_winnow import bench_trainer
from tests.bench.world import make_world


def matmul_rate(size: int = 1024, repeats: int = 15) -> float:
    """Return the FLOPs per second of a product of two large matrices: the median."""
    one, other, times = torch.randn(size, size), torch.randn(size, size), list[float]()
    for _ in range(repeats):
        started = time.perf_counter()
        one @ other
        times.append(time.perf_counter() - started)
    return 2.0 * size**3 / statistics.median(times)


def parts(root: Path, steps: int) -> Iterator[str]:
    """Yield a line for each part of a run: its time, and its FLOPs per second as a share of the
    rate of matrix products."""
    rates = [matmul_rate()]
    trainer = bench_trainer(root, 0)
    seconds, executed = trainer.state.seconds, trainer.state.ledger.executed
    checkpoints = Checkpoints(Layout(root).checkpoints, {}, keep=1)
    started = time.perf_counter()
    with closing(trainer.collector.grader):
        train(trainer, checkpoints, CheckpointSettings(1e9, 1), lambda *_: None)
    whole = time.perf_counter() - started
    rate = statistics.mean([*rates, matmul_rate()])
    yield f"matrix products: {rate / 1e9:.0f} GFLOP/s"
    for part in ("generate", "update"):
        share = executed[part] / seconds[part] / rate
        yield f"{part}: {1e3 * seconds[part] / steps:.1f} ms a step, {share:.0%} of that rate"
    rest = whole - seconds["generate"] - seconds["update"]
    yield f"rest: {1e3 * rest / steps:.1f} ms a step"


def sampled(trainer: Trainer, steps: int) -> Iterator[Rollouts]:
    """Yield the rollouts of the first steps, all of the initial policy."""
    for _ in range(steps):
        trainer.queue.fill(trainer.learner.version)
        (batch,) = trainer.queue.take(1)
        trainer.queue.observe(batch.step + 1)
        yield trainer.estimate(trainer.scored(batch.fresh), trainer.rng())


def seconds_of(trainer: Trainer, steps: list[Rollouts], model: Any) -> float:
    """Return the CPU seconds of the gradients of these steps."""
    learner = trainer.learner
    learner.model, started = model, time.thread_time()
    for rollouts in steps:
        learner.compute_gradient(rollouts, trainer.slots.loss)
    return time.thread_time() - started


def compare(root: Path, steps: int, rounds: int, backend: str) -> str:
    """Return the medians of both modes, and the seconds to compile."""
    trainer = bench_trainer(root, 0)
    with closing(trainer.collector.grader):
        rollouts = list(sampled(trainer, steps))
    models = {"eager": trainer.learner.model, "compiled": copy.deepcopy(trainer.learner.model)}
    models["compiled"].base_model.compile(dynamic=True, backend=backend)
    started = time.perf_counter()
    for _ in range(2):  # unforeseen shapes compile again
        seconds_of(trainer, rollouts, models["compiled"])
    first = time.perf_counter() - started
    times: dict[str, list[float]] = {name: [] for name in models}
    for _ in range(rounds):
        for name, model in models.items():
            times[name].append(seconds_of(trainer, rollouts, model))
    eager, compiled = (statistics.median(times[name]) for name in models)
    return (
        f"{1e3 * eager / steps:,.0f} ms a step, compiled {1e3 * compiled / steps:,.0f} ms "
        f"({compiled / eager - 1:+.0%}), compiled in {first - 2 * compiled:.1f} s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--steps", type=int, default=40, help="training steps of the tiny policy")
    parser.add_argument("--rounds", type=int, default=3, help="how often both alternate")
    parser.add_argument("--large", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--backend", default="inductor", help="of torch.compile")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    for name in ("embedded", "large")[: 1 + options.large]:
        large, steps = name == "large", options.steps if name == "embedded" else 2
        with tempfile.TemporaryDirectory() as folder:
            make_world(Path(folder), steps=steps, large=large)
            for line in parts(Path(folder), steps):
                print(f"{name}: {line}", flush=True)
            print(f"{name}: {compare(Path(folder), steps, options.rounds, options.backend)}")


if __name__ == "__main__":
    main()
