"""Compare the update in eager mode and with torch.compile (dynamic shapes).

    python -m tests.bench.compiled [--steps 20] [--rounds 3] [--no-large]

For the embedded policy and the large one of `tests.bench.world`, on one thread. Both see the same
rollouts and alternate, A B A B; values are medians of the CPU seconds of the working thread, which
other jobs on the same cores disturb least."""

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

from tasks.train.loop.trainer import Trainer
from tasks.train.rollouts import Rollouts
from tests.bench.side_winnow import bench_trainer
from tests.bench.world import make_world


def sampled(trainer: Trainer, steps: int) -> Iterator[Rollouts]:
    """Yield the rollouts of the first steps, all of the initial policy."""
    for _ in range(steps):
        trainer.buffer.reserve(trainer.buffer.num_sampled + 1)
        trainer.buffer.fill(trainer.learner.version)
        (batch,) = trainer.buffer.take(1)
        trainer.buffer.observe(batch.step + 1)
        yield trainer.estimate(trainer.observe_policy(batch.fresh), trainer.rng())


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
    parser.add_argument("--steps", type=int, default=20, help="training steps of the tiny policy")
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
            print(f"{name}: {compare(Path(folder), steps, options.rounds, options.backend)}")


if __name__ == "__main__":
    main()
