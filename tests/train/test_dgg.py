"""Further epochs of a batch that end at an unusual gradient (DGG)."""

import contextlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tasks.common.params import ParamsError
from tasks.train.loop.loop import learn
from tasks.train.methods.loss import dgg
from tasks.train.settings import Entropy
from tests.train import test_sharding as sharding
from tests.train.worlds import (
    Killed,
    dying_after,
    make_trainer,
    make_world,
    outputs,
    run,
    sampled,
)

SIZES = [4, 2, 6] * 8
NO_WEIGHTS = np.zeros(1)


def factors(method: dgg.Method, *steps: tuple[float, int]) -> list[float]:
    """The factors of updates with these norms and numbers of earlier epochs."""
    return [method.rate_factor(NO_WEIGHTS, norm, reuse) for norm, reuse in steps]


def test_scores_by_hand() -> None:
    assert dgg.score(5.0, np.array([1.0, 3.0])) == 3.0
    assert dgg.score(5.0, np.array([1.0])) == 0.0
    assert dgg.score(5.0, np.array([2.0, 2.0])) == 0.0


def test_an_unusual_gradient_ends_the_reuse() -> None:
    """Squares 1, 3, 2 and their changes 1, 2, -1."""
    method = dgg.Method(dgg.Settings(limit=0.5, window=32))
    assert factors(method, (1.0, 0), (3**0.5, 0), (2**0.5, 0)) == [1.0, 1.0, 1.0]
    norms, changes = method.state.norms.copy(), method.state.changes.copy()
    np.testing.assert_allclose(norms, [1.0, 3.0, 2.0])
    np.testing.assert_allclose(changes, [1.0, 2.0, -1.0])
    # mean 2, deviation .8165: 2.5 is .61 above
    assert factors(method, (2.5**0.5, 1)) == [0.0]
    assert (method.state.norms == norms).all()  # a dropped gradient is no example
    assert (method.state.changes == changes).all()
    assert method.state.latest == pytest.approx(2.5)
    # the change of -.2 is usual, and so is 2.3, at .37
    assert factors(method, (2.3**0.5, 1)) == [1.0]
    assert factors(method, (9.0, 0)) == [1.0]  # the first epoch is never gated
    # after squares of 1, 98, 96, 1 a square of 81 is usual, and its change of 80 is not
    found = dgg.Method(dgg.Settings(limit=1.0, window=4))
    factors(found, (10.0, 0), (1.0, 0), (9.9, 0), (9.8, 0))
    assert factors(found, (1.0, 1), (9.0, 1)) == [1.0, 0.0]


def test_the_window_forgets() -> None:
    method = dgg.Method(dgg.Settings(window=2))
    factors(method, (1.0, 0), (2.0, 0), (3.0, 0))
    assert method.state.norms.tolist() == [4.0, 9.0]
    assert method.state.changes.tolist() == [3.0, 5.0]
    with pytest.raises(ParamsError, match=r"train.loss.window is 1; it must be at least 2"):
        dgg.Settings(window=1)
    with pytest.raises(ParamsError, match=r"train.loss.limit is 0.0; it must be above 0"):
        dgg.Settings(limit=0.0)
    with pytest.raises(ParamsError, match=r"train.loss.dual is 1"):
        dgg.Settings(dual=1.0)


def test_a_bonus_with_a_target_keeps_its_coefficient() -> None:
    method = dgg.Method(dgg.Settings(entropy=Entropy(0.01, target=0.2)))
    method.observe_entropy(0.1)
    assert method.bonus() == pytest.approx(0.015)
    constant = dgg.Method(dgg.Settings(entropy=Entropy(0.02)))
    constant.observe_entropy(0.1)
    assert constant.bonus() == 0.02


def changes_of(method: str, **settings: Any) -> dict[str, Any]:
    updates = {"epochs": 3, "minibatches": 2}
    return {"updates": updates, "learning_rate": 1e-2, "loss": {"method": method, **settings}}


def test_a_gate_that_never_closes_changes_nothing(guesser: Path, tmp_path: Path) -> None:
    layouts = [make_world(tmp_path / side, guesser, SIZES) for side in ("plain", "gated")]
    run(layouts[0], changes_of("clip"))
    run(layouts[1], changes_of("dgg", limit=1e9))
    first, second = map(outputs, layouts)
    assert first == second
    one = [make_world(tmp_path / f"{side}-1", guesser, SIZES) for side in ("plain", "gated")]
    run(one[0], {**changes_of("clip"), "updates": {"epochs": 1}})
    run(one[1], {**changes_of("dgg", limit=1e-9), "updates": {"epochs": 1}})
    first, second = map(outputs, one)
    assert first == second


def test_a_dropped_gradient_leaves_the_optimizer_and_ends_the_step(
    guesser: Path, tmp_path: Path
) -> None:
    """The third of six updates is dropped."""
    trainer = make_trainer(make_world(tmp_path, guesser, SIZES), **changes_of("dgg"))
    loss, learner, seen = trainer.slots.loss, trainer.learner, []

    def gate(log_weights_B: Any, norm: float, reuse: int) -> float:
        seen.append((norm, reuse))
        return float(len(seen) < 3)

    loss.rate_factor = gate
    batch = sampled(trainer)
    assert batch is not None
    row = learn(trainer, batch)
    assert [reuse for _, reuse in seen] == [0, 0, 1]
    assert min(norm for norm, _ in seen) > 0.0
    assert row["num_updates"] == learner.version == 2
    steps = {int(state["step"]) for state in learner.optimizer.state.values()}
    assert steps == {2}
    other = make_trainer(make_world(tmp_path / "other", guesser, SIZES), **changes_of("clip"))
    again = sampled(other)
    assert again is not None
    stepped = []
    step = other.learner.step

    def twice(rate: float) -> None:
        if len(stepped) < 2:
            step(rate)
        stepped.append(rate)

    other.learner.step = twice  # type: ignore[method-assign]
    learn(other, again)
    for mine, theirs in zip(
        learner.optimizer.state.values(), other.learner.optimizer.state.values(), strict=True
    ):
        assert torch.equal(mine["exp_avg"], theirs["exp_avg"])
        assert torch.equal(mine["exp_avg_sq"], theirs["exp_avg_sq"])
    pairs = zip(learner.model.parameters(), other.learner.model.parameters(), strict=True)
    assert all(torch.equal(*pair) for pair in pairs)
    assert trainer.state.ledger.executed["update"] < other.state.ledger.executed["update"]


def test_two_processes_close_the_gate_together(guesser: Path, tmp_path: Path) -> None:
    case = {"train": {**changes_of("dgg", limit=0.2, window=4), "learning_rate": 1e-3}}
    found = []
    for name, size, shard in (("one", 0, "none"), ("two", 2, "fsdp2")):
        layout = sharding.world(tmp_path / name, guesser, case, shard)
        out = sharding.run(layout, size, 5, tmp_path / f"{name}-out")
        steps = json.loads((out / "steps.json").read_text())
        found.append((out, [row["num_updates"] for row in steps]))
    (one, mine), (two, theirs) = found
    assert mine == theirs
    assert len(set(mine)) > 1
    assert sharding.same_tensors(one / "model", two / "model", 1e-4)


def test_a_killed_run_goes_on_with_its_gate(guesser: Path, tmp_path: Path) -> None:
    layouts = [make_world(tmp_path / side, guesser, SIZES) for side in ("whole", "killed")]
    whole = run(layouts[0], changes_of("dgg", limit=0.2, window=4))
    assert len({row["num_updates"] for row in whole.state.steps}) > 1  # some end early
    for last in (2, 4):
        with dying_after(last) as dying, contextlib.suppress(Killed):
            run(layouts[1], changes_of("dgg", limit=0.2, window=4), prepare=dying)
    run(layouts[1], changes_of("dgg", limit=0.2, window=4))
    first, second = map(outputs, layouts)
    assert first == second
