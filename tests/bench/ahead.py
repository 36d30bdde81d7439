"""What sampling ahead of training saves: the wall time of the same steps at `max_staleness` 0, 1
and 3, by the speed of the engine.

    python -m tests.bench.ahead [--steps 48] [--repeats 5] [--rollouts 64] [--out FILE]

The embedded policy learns in this process. Its engine stands for one on a device of its own: it
waits, so long a token, and then answers what the real one answered in a run with the same limit,
which is recorded first. A run is the same however long its engine takes: that it asks for the same,
and learns the same, is checked. The wait is a given multiple of what the synchronous loop needs for
all else. Runs of the compared limits alternate; medians, and ratios within one repeat. The limits'
runs differ a little in their tokens, which are in the rows. The verifier runs in a process of its
own.
"""

import json
import statistics
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

from tasks.engines.engine import Request, Samples
from tasks.train.checkpoint.checkpoints import Checkpoints
from tasks.train.loop.loop import train
from tasks.train.loop.trainer import Trainer
from tasks.train.settings import CheckpointSettings
from tests.bench.side_winnow import bench_trainer
from tests.bench.world import NEVER, compare_in_world, ratios

Generate = Callable[..., Samples]
Tape = list[tuple[Request, Samples]]
LIMITS = (0, 1, 3)
SPEEDS = (0.5, 1.0, 2.0)
"""Seconds of sampling over seconds of the rest of a step."""


def run(root: Path, steps: int, limit: int, engine: Callable[[Generate], Generate]) -> Trainer:
    """A run of `steps` steps with another engine."""
    trainer = bench_trainer(root, 0, max_staleness=limit, max_steps=steps)
    trainer.collector.engine.generate = engine(trainer.collector.engine.generate)  # type: ignore[method-assign]
    return timed(trainer)


def timed(trainer: Trainer) -> Trainer:
    """The trainer at the end of its loop, with the seconds that it took."""
    with tempfile.TemporaryDirectory() as folder, closing(trainer.collector.grader) as grader:
        grader.grader.started(set(trainer.prompts.table["verifier"]))
        checkpoints = Checkpoints(Path(folder), {"recipe": "bench", "seed": 0}, 1)
        trainer.add_point(0.0)
        started = time.perf_counter()
        train(trainer, checkpoints, CheckpointSettings(NEVER, 1), lambda *_: None)
        trainer.state.seconds["all"] = time.perf_counter() - started
    return trainer


def recorder(tape: Tape) -> Callable[[Generate], Generate]:
    """The engine as it is, its answers kept."""

    def changed(generate: Generate) -> Generate:
        def generate_and_keep(request: Request, *more: Any) -> Samples:
            samples = generate(request, *more)
            tape.append((request, samples))
            return samples

        return generate_and_keep

    return changed


def player(tape: Tape, seconds: float) -> Callable[[Generate], Generate]:
    """An engine that answers from a tape, after so many seconds a token."""
    answers = iter(tape)

    def changed(_: Generate) -> Generate:
        def wait_and_answer(request: Request, *more: Any) -> Samples:
            recorded, samples = next(answers)
            if request != recorded:
                raise RuntimeError("the run asks for something else than the one that was recorded")
            time.sleep(seconds * num_tokens([(request, samples)]))
            return samples

        return wait_and_answer

    return changed


def compare(root: Path, steps: int, repeats: int, rollouts: int) -> list[dict[str, float]]:
    """A row for every speed of the engine and limit."""
    tapes: dict[int, Tape] = {limit: [] for limit in LIMITS}
    rewards = {
        limit: rewards_of(run(root, steps, limit, recorder(tapes[limit]))) for limit in LIMITS
    }
    tokens = {limit: num_tokens(tape) for limit, tape in tapes.items()}
    rest = statistics.median(
        run(root, steps, 0, player(tapes[0], 0.0)).state.seconds["all"] for _ in range(repeats)
    )
    a_token = rest / tokens[0]
    rows = []
    for speed in SPEEDS:
        found: dict[int, list[float]] = {limit: [] for limit in LIMITS}
        for repeat in range(repeats):
            first = repeat % len(LIMITS)
            for limit in LIMITS[first:] + LIMITS[:first]:
                trainer = run(root, steps, limit, player(tapes[limit], speed * a_token))
                if rewards_of(trainer) != rewards[limit]:
                    raise RuntimeError(f"max_staleness {limit}: not the run that was recorded")
                found[limit].append(trainer.state.seconds["all"])
        for limit in LIMITS:
            row = {
                "sampling_over_rest": speed,
                "max_staleness": limit,
                "tokens": tokens[limit],
                "seconds": statistics.median(found[limit]),
                **ratios("ratio", found[limit], found[0]),
            }
            print(json.dumps(row), flush=True)
            rows.append(row)
    return rows


def num_tokens(tape: Tape) -> int:
    return sum(len(tokens) for _, samples in tape for tokens in samples.token_ids)


def rewards_of(trainer: Trainer) -> list[tuple[float, float]]:
    """What a run did, step by step."""
    return [(row["reward_mean"], row["grad_norm"]) for row in trainer.state.steps]


if __name__ == "__main__":
    compare_in_world(__doc__, compare, steps=48, repeats=5, rollouts=64)
