"""Several processes: what only the first keeps, and gradients that are summed in buckets."""

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tasks.train.learner.learner import Gradient
from tasks.train.learner.ranks import Ranks
from tasks.train.learner.update import UpdateStats
from tests.train.worlds import make_trainer, make_world


@pytest.mark.parametrize("rank", [0, 1])
def test_only_the_first_rank_keeps_rows_of_rollouts(
    rank: int, guesser: Path, tmp_path: Path
) -> None:
    trainer = make_trainer(make_world(tmp_path, guesser, [4, 4, 4]))
    with closing(trainer.collector.grader):
        batch = trainer.sample()
        assert batch is not None
        trainer.run = replace(trainer.run, ranks=Ranks(rank, 2))
        keep_B, advantages_B = trainer.estimate(batch.fresh, trainer.rng(1))
        numbers: dict[str, Any] = {"learning_rate": 0.0, "nonfinite": False}
        gradient = Gradient(UpdateStats(), None)
        trainer.record(batch, batch.fresh, keep_B, advantages_B, gradient, numbers)
    assert len(trainer.state.rollouts) == (4 if rank == 0 else 0)
    assert len(trainer.state.steps) == 1
