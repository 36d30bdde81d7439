"""A reference that becomes the policy every so many steps."""

import copy
from pathlib import Path
from typing import Any

from tasks.train.loop.loop import learn
from tests.train.worlds import make_trainer, make_world, same_parameters, sampled

SIZES = [4, 2, 6] * 6


def changes_of(reset_every: int | None, **more: Any) -> dict[str, Any]:
    reference = {"source": None, "reset_every": reset_every}
    return {"kl_coefficient": 0.1, "learning_rate": 1e-2, "reference": reference, **more}


def test_the_reference_is_the_policy_after_every_second_step(guesser: Path, tmp_path: Path) -> None:
    trainer = make_trainer(make_world(tmp_path, guesser, SIZES), **changes_of(2))
    learner, divergences = trainer.learner, []
    before = copy.deepcopy(learner.reference)
    for step in range(4):
        batch = sampled(trainer)
        divergences.append(learn(trainer, batch)["kl"])
        trainer.sync_engine()
        assert same_parameters(learner.model, learner.reference) == (step % 2 == 1)
        assert same_parameters(before, learner.reference) == (step == 0)
    first, second, third, fourth = divergences
    assert first == third == 0.0
    assert min(second, fourth) > 0.0
