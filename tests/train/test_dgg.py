"""Further epochs of a batch, which an unusual gradient ends (DGG)."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tasks.train.loop.loop import learn
from tasks.train.methods.loss import dgg
from tests.train.worlds import make_trainer, make_world, sampled

SIZES = [4, 2, 6] * 8
NO_WEIGHTS = np.zeros(1)


def factors(method: dgg.Method, *steps: tuple[float, int]) -> list[float]:
    """Return the factors of updates with these norms and numbers of earlier epochs."""
    return [method.rate_factor(NO_WEIGHTS, norm, reuse) for norm, reuse in steps]


def test_scores_by_hand() -> None:
    assert dgg.score(5.0, np.array([1.0, 3.0])) == 3.0
    assert dgg.score(5.0, np.array([1.0])) == 0.0
    assert dgg.score(5.0, np.array([2.0, 2.0])) == 0.0


def test_an_unusual_gradient_ends_the_reuse() -> None:
    """The squares are 1, 3, 2 and their changes 1, 2, -1."""
    method = dgg.Method(dgg.Settings(limit=0.5, window=32))
    assert factors(method, (1.0, 0), (3**0.5, 0), (2**0.5, 0)) == [1.0, 1.0, 1.0]
    norms, changes = method.state.norms.copy(), method.state.changes.copy()
    np.testing.assert_allclose(norms, [1.0, 3.0, 2.0])
    np.testing.assert_allclose(changes, [1.0, 2.0, -1.0])
    # mean 2, deviation .8165: 2.5 is .61 above
    assert factors(method, (2.5**0.5, 1)) == [0.0]
    assert (method.state.norms == norms).all()  # a dropped gradient is not recorded
    assert (method.state.changes == changes).all()
    assert method.state.latest == pytest.approx(2.5)
    # the change of -.2 is usual, and so is 2.3, at .37
    assert factors(method, (2.3**0.5, 1)) == [1.0]
    assert factors(method, (9.0, 0)) == [1.0]  # there is no gate in the first epoch
    # after the last four squares, 1, 98, 96, 1, 81 is usual, and its change of 80 is not
    found = dgg.Method(dgg.Settings(limit=1.0, window=4))
    factors(found, (10.0, 0), (1.0, 0), (9.9, 0), (9.8, 0))
    assert factors(found, (1.0, 1), (9.0, 1)) == [1.0, 0.0]


def test_a_dropped_gradient_skips_the_optimizer_and_ends_the_step(
    guesser: Path, tmp_path: Path
) -> None:
    """The third of six updates is dropped."""
    changes = {"updates": {"epochs": 3, "minibatches": 2}, "loss": {"method": "dgg"}}
    trainer = make_trainer(make_world(tmp_path, guesser, SIZES), **changes)
    loss, learner, seen = trainer.slots.loss, trainer.learner, []

    def gate(log_weights_B: Any, norm: float, reuse: int) -> float:
        seen.append((norm, reuse))
        return float(len(seen) < 3)

    loss.rate_factor = gate
    batch = sampled(trainer)
    row = learn(trainer, batch)
    assert [reuse for _, reuse in seen] == [0, 0, 1]
    assert min(norm for norm, _ in seen) > 0.0
    assert row["num_updates"] == learner.version == 2
    steps = {int(state["step"]) for state in learner.optimizer.state.values()}
    assert steps == {2}
