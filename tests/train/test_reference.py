"""A reference that becomes the policy every so many steps."""

import contextlib
import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tasks.common.params import ParamsError
from tasks.train.loading import settings_of
from tasks.train.loop.loop import learn
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

SIZES = [4, 2, 6] * 6


def changes_of(reset_every: int | None, **more: Any) -> dict[str, Any]:
    reference = {"source": None, "reset_every": reset_every}
    return {"kl_coefficient": 0.1, "learning_rate": 1e-2, "reference": reference, **more}


def test_the_reference_is_the_policy_after_every_second_step(guesser: Path, tmp_path: Path) -> None:
    trainer = make_trainer(make_world(tmp_path, guesser, SIZES), **changes_of(2))
    learner, divergences = trainer.learner, []
    assert learner.reference is not None
    before = copy.deepcopy(list(learner.reference.parameters()))
    for step in range(4):
        batch = sampled(trainer)
        assert batch is not None
        divergences.append(learn(trainer, batch)["kl"])
        trainer.sync_engine()
        pairs = zip(learner.model.parameters(), learner.reference.parameters(), strict=True)
        assert all(torch.equal(*pair) for pair in pairs) == (step % 2 == 1)
        held = zip(before, learner.reference.parameters(), strict=True)
        assert all(torch.equal(*pair) for pair in held) == (step == 0)
    first, second, third, fourth = divergences
    assert first == third == 0.0
    assert min(second, fourth) > 0.0


def test_a_reference_that_is_never_reset_changes_nothing(guesser: Path, tmp_path: Path) -> None:
    layouts = [make_world(tmp_path / side, guesser, SIZES) for side in ("never", "late")]
    run(layouts[0], changes_of(None))
    run(layouts[1], changes_of(1000))
    first, second = map(outputs, layouts)
    assert first == second


@pytest.mark.parametrize(
    "more", [{}, {"branches": [0.5], "decay_share": 0.4}, {"updates": {"epochs": 2}}]
)
def test_a_killed_run_goes_on_with_its_reference(
    more: dict[str, Any], guesser: Path, tmp_path: Path
) -> None:
    layouts = [make_world(tmp_path / side, guesser, SIZES) for side in ("whole", "killed")]
    run(layouts[0], changes_of(2, **more))
    for last in (2, 4):
        with dying_after(last) as dying, contextlib.suppress(Killed):
            run(layouts[1], changes_of(2, **more), prepare=dying)
    run(layouts[1], changes_of(2, **more))
    first, second = map(outputs, layouts)
    assert first == second


def test_two_ranks_with_a_part_each_reset_their_parts(guesser: Path, tmp_path: Path) -> None:
    """And go on from a checkpoint; as one process does."""
    case = {"train": changes_of(2, learning_rate=1e-3)}
    found = []
    for name, size, parts in (("one", 0, [5]), ("two", 2, [3, 5])):
        layout = sharding.world(tmp_path / name, guesser, case, "fsdp2" if size else "none")
        for num_steps in parts:
            out = sharding.run(layout, size, num_steps, tmp_path / f"{name}-{num_steps}")
        found.append((out, json.loads((out / "steps.json").read_text())))
    (one, mine), (two, theirs) = found
    assert [row["kl"] for row in mine] == pytest.approx([row["kl"] for row in theirs], abs=1e-4)
    assert sharding.same_tensors(one / "model", two / "model", 1e-4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (changes_of(0), r"train.reference.reset_every is 0; it must be at least 1"),
        (changes_of(2, kl_coefficient=0.0), r"reset_every is 2, but nothing uses it"),
        (changes_of(2, lora={"rank": 2, "alpha": 4.0}), "is the policy without its adapters"),
        (
            {"kl_coefficient": 0.1, "reference": {"source": "there", "reset_every": 2}},
            "the reference is a teacher: set it to null",
        ),
        (
            changes_of(2, loss={"method": "regression"}),
            r"compares the policy with the initial one, but train.reference.reset_every is 2",
        ),
    ],
)
def test_mistakes_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ParamsError, match=message):
        settings_of(changes)
