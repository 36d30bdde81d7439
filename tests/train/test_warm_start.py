"""Supervised steps before the first one: their effect, their cost, and kills."""

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from tasks.common.accounting.spending import CellBudget
from tasks.common.artifacts import PROMPTS, SAMPLES, Layout
from tasks.common.files import ArtifactError
from tasks.train.loop.state import TrainingError
from tasks.train.loop.trainer import Trainer
from tasks.train.settings import WarmStart
from tasks.train.warm_start import batch_rows
from tests.train.test_asynchronous import Killed, run
from tests.train.worlds import make_trainer, make_world, outputs

SIZES = [4] * 12
WARM: dict[str, Any] = {"data": "profile", "steps": 6, "batch_size": 4, "learning_rate": 0.01}


def with_solutions(layout: Layout) -> Layout:
    """Add a worked solution to the first two training prompts of the world."""
    path = layout.prompts("train")
    texts = pl.Series(["1 + 0 = 7", "7", None, None, None, None], dtype=pl.String)
    PROMPTS.write(path, PROMPTS.read(path).with_columns(solution=texts))
    return layout


def test_a_pass_over_the_demonstrations_takes_each_once() -> None:
    settings = WarmStart(data="profile", batch_size=4)
    rows = np.concatenate([batch_rows(6, settings, 0, step) for step in range(3)])
    assert sorted(rows[:6]) == sorted(rows[6:]) == list(range(6))
    assert rows[:6].tolist() != rows[6:].tolist()


@pytest.mark.parametrize("data", ["profile", "solutions"])
def test_a_warm_start_learns_and_is_charged_before_the_first_step(
    data: str, guesser: Path, tmp_path: Path
) -> None:
    layouts = [with_solutions(make_world(tmp_path / name, guesser, SIZES)) for name in "ab"]
    changes = {"max_steps": 1, "validation": {"num_samples": 16, "every_share": 1.0}}
    plain = run(layouts[0], changes)
    trainer = run(layouts[1], {**changes, "warm_start": {**WARM, "data": data}})
    before, after = plain.state.curve[0], trainer.state.curve[0]
    assert after["accuracy"] > before["accuracy"]  # the demonstrations contain the answer
    ledgers = [found.state.ledger for found in (plain, trainer)]
    assert trainer.state.num_warm_steps == WARM["steps"] <= trainer.learner.version
    updated = ledgers[1].rollouts["update"] - ledgers[0].rollouts["update"]
    assert updated == WARM["steps"] * WARM["batch_size"]
    assert before["flops_charged"] == 0 < after["flops_charged"] == after["flops_charged_mixed"]
    assert after["flops_executed"] > before["flops_executed"]


def test_a_warm_start_counts_in_the_budget(guesser: Path, tmp_path: Path) -> None:
    def spend(name: str, amount: float, **changes: Any) -> Trainer:
        layout = make_world(tmp_path / name, guesser, SIZES)
        CellBudget("charged", amount, 0.0).write(layout.plan("r", 0) / "budget.json")
        return run(layout, {"warm_start": WARM, **changes})

    cost = spend("all", 1e99, max_steps=1).state.curve[0]["flops_charged"]
    trainer = spend("four", 4 * cost, decay_share=0.5)
    assert trainer.first_share == pytest.approx(0.25)
    assert trainer.budget.spent == pytest.approx(4 * cost, rel=0.1)
    # the rate decays over the second half of the rest
    rates = {row["learning_rate"] for row in trainer.state.steps[:2]}
    assert rates == {1e-3}
    with pytest.raises(TrainingError, match=r"spends experiment.budget by step \d .*: lower train"):
        spend("half", 0.45 * cost)


@pytest.mark.parametrize(
    "changes",
    [
        {"replay": {"method": "profile", "share": 0.5, "capacity": 8}},
        {"max_staleness": 1, "lora": {"rank": 2, "alpha": 4.0}},
    ],
    ids=lambda changes: "-".join(changes),
)
def test_a_kill_during_the_warm_start_changes_nothing(
    changes: dict[str, Any], guesser: Path, tmp_path: Path
) -> None:
    layouts = [make_world(tmp_path / side, guesser, SIZES) for side in ("whole", "killed")]
    changes = {"warm_start": WARM, "max_steps": 3, **changes}
    for layout in layouts:
        CellBudget("executed", 1e99, 0.0).write(layout.plan("r", 0) / "budget.json")
    run(layouts[0], changes)
    for last in (2, 4):

        def dying(trainer: Trainer, last: int = last) -> None:
            step = trainer.learner.step

            def step_or_die(rate: float) -> None:
                if trainer.state.num_warm_steps == last and not trainer.state.num_steps:
                    raise Killed
                step(rate)

            trainer.learner.step = step_or_die  # type: ignore[method-assign]

        with contextlib.suppress(Killed):
            run(layouts[1], changes, prepare=dying)
    resumed = run(layouts[1], changes)
    assert resumed.state.num_warm_steps == WARM["steps"]
    first, second = map(outputs, layouts)
    assert first == second


def test_data_without_a_demonstration_is_refused(guesser: Path, tmp_path: Path) -> None:
    layout = make_world(tmp_path, guesser, SIZES)
    with pytest.raises(ArtifactError, match="no training prompt has a worked solution: name its"):
        make_trainer(layout, warm_start={"data": "solutions"})
    path = layout.plan("r", 0) / "samples.parquet"
    SAMPLES.write(path, SAMPLES.read(path).with_columns(outcome=pl.lit("wrong")))
    with pytest.raises(ArtifactError, match="no sample of the profile is correct among the"):
        make_trainer(layout, warm_start={"data": "profile"})
