"""What it saves to judge completions while others are sampled: the wall time of the same steps with
it and without, by how long the verifiers take.

    python -m tests.bench.early [--steps 4] [--repeats 5] [--rollouts 1024] [--rows 128]

The embedded policy learns in this process and samples by the engine `hf`, whose rows are fewer than
a step's rollouts, so that completions end all along; a step samples for over a second, in which
there are a dozen lists of them. The verifiers stand for ones with processors of their own: before a
list of answers is judged, the grader's thread waits, so long an answer. The wait for a step's
answers is a given multiple of the time in which they are sampled. Without, the engine does not say
what has ended. Both give the same rewards and gradients, which is checked. They alternate; medians,
and ratios within one repeat.
"""

import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tasks.engines.engine import OnEnded, Request, Samples
from tasks.engines.hf.engine import HfEngine
from tasks.grading.grader import Answer, Grader
from tasks.grading.verdict import Verdict
from tasks.train.loop.trainer import Trainer
from tests.bench.ahead import rewards_of, timed
from tests.bench.side_winnow import bench_trainer
from tests.bench.world import compare_in_world, ratios

MULTIPLES = (0.0, 0.25, 0.5, 1.0)
"""Seconds of judging a step's answers over those of sampling them."""


def run(root: Path, steps: int, rows: int, seconds: float, is_early: bool) -> Trainer:
    """A run of `steps` steps, whose verifiers take so many seconds an answer."""
    trainer = bench_trainer(root, 0, max_steps=steps)
    engine, grader = trainer.collector.engine, trainer.collector.grader
    if not isinstance(engine, HfEngine):
        raise RuntimeError(f"the benchmark sets the rows of hf, not of {engine.name}")
    engine.max_rows = rows
    wait(grader.grader, seconds)
    if not is_early:
        say_nothing(engine)
    return timed(trainer)


def wait(grader: Grader, seconds: float) -> None:
    """Have a grader wait so long an answer before it judges."""
    grade = grader.grade

    def slow(answers: Sequence[Answer], *more: Any, **named: Any) -> list[Verdict]:
        time.sleep(seconds * len(answers))
        return grade(answers, *more, **named)

    grader.grade = slow  # type: ignore[method-assign]


def say_nothing(engine: HfEngine) -> None:
    """Have an engine not say what has ended."""
    generate = engine.generate

    def silent(request: Request, on_ended: OnEnded | None = None) -> Samples:
        return generate(request)

    engine.generate = silent  # type: ignore[method-assign]


def compare(
    root: Path, steps: int, repeats: int, rollouts: int, rows: int
) -> list[dict[str, float]]:
    """A row for every multiple."""
    first = run(root, steps, rows, 0.0, is_early=True)
    sampled = first.state.seconds["generate"] / (steps * rollouts)
    found = []
    for multiple in MULTIPLES:
        seconds: dict[bool, list[float]] = {True: [], False: []}
        for repeat in range(repeats):
            for is_early in (repeat % 2 == 0, repeat % 2 == 1):
                trainer = run(root, steps, rows, multiple * sampled, is_early)
                if rewards_of(trainer) != rewards_of(first):
                    raise RuntimeError("the run depends on when its completions are judged")
                seconds[is_early].append(trainer.state.seconds["all"])
        row = {
            "judging_over_sampling": multiple,
            "seconds_early": statistics.median(seconds[True]),
            "seconds_late": statistics.median(seconds[False]),
            **ratios("ratio", seconds[True], seconds[False]),
        }
        print(json.dumps(row), flush=True)
        found.append(row)
    return found


if __name__ == "__main__":
    compare_in_world(__doc__, compare, steps=4, repeats=5, rollouts=1024, rows=128)
