"""Sampling ahead of training: the age of policies, the cost of a kill, and independence of the
clock."""

import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tasks.common.artifacts import STEPS, TRAIN_ROLLOUTS
from tasks.engines.engine import Request, Samples
from tasks.train.loop.trainer import Trainer
from tests.train.worlds import (
    Killed,
    make_trainer,
    make_world,
    outputs,
    run,
    train_to_end,
)

SIZES = [4] * 24  # eight steps of three groups
LONG = [4] * 36


def delayed(sampling: float, learning: float, seed: int = 0) -> Callable[[Trainer], None]:
    """Delay each side by up to so many seconds, at random."""

    def prepare(trainer: Trainer) -> None:
        engine, learner, rng = trainer.collector.engine, trainer.learner, random.Random(seed)
        generate, gradient = engine.generate, learner.compute_gradient

        def slow_generate(request: Request, *more: Any) -> Samples:
            time.sleep(sampling * rng.random())
            return generate(request, *more)

        def slow_gradient(*arguments: Any, **named: Any) -> Any:
            time.sleep(learning * rng.random())
            return gradient(*arguments, **named)

        engine.generate = slow_generate  # type: ignore[method-assign]
        learner.compute_gradient = slow_gradient  # type: ignore[method-assign]

    return prepare


@pytest.mark.parametrize(
    ("dtype", "limit", "expected"),
    [("bfloat16", 0, True), ("bfloat16", 1, False), ("float32", 0, False)],
)
def test_no_thread_samples_while_a_head_is_in_tf32(
    dtype: str, limit: int, expected: bool, guesser: Path, tmp_path: Path
) -> None:
    changes = {"dtype": dtype, "max_staleness": limit}
    trainer = make_trainer(make_world(tmp_path, guesser, [4, 4]), **changes)
    assert trainer.learner.objective(trainer.slots.loss).is_tf32 == expected


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_no_token_is_older_than_the_limit_at_any_speed(
    limit: int, guesser: Path, tmp_path: Path
) -> None:
    changes = {"max_staleness": limit, "advantage": {"method": "rloo"}}
    found = []
    for name, prepare in (
        ("slow sampling", delayed(0.03, 0.0)),
        ("slow learning", delayed(0.0, 0.03)),
    ):
        layout = make_world(tmp_path / name, guesser, SIZES)
        trainer = run(layout, changes, prepare=prepare)
        found.append(outputs(layout))
    rows = TRAIN_ROLLOUTS.read(layout.train("r", 0) / "rollouts.parquet")
    # updates before training on a step, less updates before sampling it
    steps = STEPS.frame(trainer.state.steps)
    made = np.concatenate([[0], np.cumsum(steps["num_updates"].to_numpy())])
    age = made[rows["step"].to_numpy()] - rows["version"].to_numpy()
    assert age.max() == (limit if limit % 2 else limit - 1)
    assert age.min() == 0
    assert found[0] == found[1]


def test_a_sampling_error_ends_the_run(guesser: Path, tmp_path: Path) -> None:
    def prepare(trainer: Trainer) -> None:
        generate = trainer.collector.engine.generate
        calls = iter(range(100))

        def failing(request: Request, *more: Any) -> Samples:
            if next(calls) == 8:
                raise OSError("the server is gone")
            return generate(request, *more)

        trainer.collector.engine.generate = failing  # type: ignore[method-assign]

    with pytest.raises(OSError, match="the server is gone"):
        run(make_world(tmp_path, guesser, SIZES), {"max_staleness": 1}, prepare=prepare)


def test_waiting_times_are_recorded(guesser: Path, tmp_path: Path) -> None:
    layout = make_world(tmp_path, guesser, SIZES)
    trainer = make_trainer(layout, max_staleness=1)
    recorded: list[dict[str, Any]] = []
    train_to_end(trainer, layout, lambda values, *_: recorded.append(dict(values)))
    rounds = [values for values in recorded if "trainer_idle_rate" in values]
    assert len(rounds) == trainer.state.num_steps
    shares = [each[f"{side}_idle_rate"] for each in rounds for side in ("trainer", "sampler")]
    assert all(0.0 <= share <= 1.0 for share in shares)
    assert {values["staleness"] for values in recorded if "staleness" in values} <= {0, 1}
    assert trainer.state.seconds["wait"] > 0.0
    assert not trainer.collector.engine.shares_weights


def test_the_trunk_does_not_depend_on_its_branches(guesser: Path, tmp_path: Path) -> None:
    found, curves = [], []
    for name, branches in (("plain", []), ("branched", [0.5])):
        layout = make_world(tmp_path / name, guesser, LONG)
        chosen = {"max_staleness": 3, "decay_share": 0.4, "branches": branches}
        trainer = run(layout, chosen)
        curves.append(trainer.state.curve)
        found.append(outputs(layout))
    plain, branched = found
    assert branched["weights"] == plain["weights"]
    assert branched["rollouts"] == plain["rollouts"]
    assert [point for point in curves[1] if point["branch"] is None] == curves[0]
    (end,) = [point for point in curves[1] if point["branch"]]
    assert end["branch"] == 0.5
    ledger = trainer.state.ledger
    assert ledger.executed["branch"] > 0
    # two steps and two more batches; rollouts from before the fork belong to the trunk
    assert ledger.rollouts["branch"] == 2 * 12


def test_a_branch_can_end_in_the_middle_of_a_round(guesser: Path, tmp_path: Path) -> None:
    changes = {"max_staleness": 3, "decay_share": 0.4, "branches": [0.41]}
    curve = run(make_world(tmp_path, guesser, LONG), changes).state.curve
    (end,) = [point for point in curve if point["branch"]]
    assert end["rollouts"] == 5 * 12


@pytest.mark.parametrize("limit", [0, 3])
def test_checkpointed_samples_are_not_lost(limit: int, guesser: Path, tmp_path: Path) -> None:
    layout, changes = make_world(tmp_path, guesser, SIZES), {"max_staleness": limit}
    with pytest.raises(Killed):
        run(layout, changes, dies_after=5)
    trainer = make_trainer(layout, **changes)
    # a round is checkpointed once it is sampled
    assert train_to_end(trainer, layout)["tokens"] == 0
    assert trainer.state.num_steps == 8
