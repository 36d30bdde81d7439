"""Staleness, over-provisioning, updates in flight and branches: with every pair of their values, a
killed run ends like one without kills."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from tasks.engines.engine import IsEnough, Request, Samples
from tasks.engines.hf.engine import HfEngine
from tasks.train.loop.trainer import Trainer
from tests.train import test_sharding as sharding
from tests.train.test_in_flight import POLL_SECONDS, Swapping
from tests.train.worlds import make_world, outputs, run, run_with_kills

SIZES = [4, 2, 6] * 8
EVERY_PAIR = [
    (1, 1.0, True, [0.5]),
    (1, 1.5, False, []),
    (2, 1.0, False, []),
    (2, 1.5, True, [0.5]),
    (3, 1.0, True, []),
    (3, 1.5, False, [0.5]),
]
"""Every two values that can be combined are in one of these. Other tests kill synchronous runs."""


def changes_of(oldest: int, surplus: float, *, in_flight: bool) -> dict[str, Any]:
    """Return the settings. With updates in flight the clock decides which weights sample what, so
    the weights are constant."""
    return {
        "max_staleness": oldest,
        "over_provision": surplus,
        "in_flight_updates": in_flight,
        "learning_rate": 1e-30 if in_flight else 3e-2,
        "decay_share": 0.4,
        "advantage": {"method": "rloo"},
    }


class StoppableSwapping(Swapping):
    """An engine that takes new weights between the parts of a batch, and between batches."""

    def generate_until(self, request: Request, is_enough: IsEnough) -> Samples:
        assert isinstance(self.engine, HfEngine)
        with self.condition:
            self.is_between = True
            self.condition.wait(POLL_SECONDS)
            self.is_between = False
            samples = self.engine.generate_until(request, is_enough)
        versions = [[self.policy_version] * len(ids) for ids in samples.token_ids]
        return dataclasses.replace(samples, versions=versions)


def prepare(trainer: Trainer) -> None:
    if trainer.run.settings.in_flight_updates:
        engine = StoppableSwapping(trainer.collector.engine)
        engine.between = lambda: engine.condition.wait(POLL_SECONDS)
        trainer.collector.engine = engine


def compared(found: dict[str, Any], *, in_flight: bool) -> dict[str, Any]:
    """Return the outputs that must be equal: in flight, not versions and their costs."""
    if not in_flight:
        return found
    varying = {"version", "versions", "sampler_logprobs", "advantage"}
    rows = [{k: v for k, v in row.items() if k not in varying} for row in found["rollouts"]]
    points = [(point["step"], point["branch"], point["accuracy"]) for point in found["curve"]]
    return {"rollouts": rows, "curve": points}


@pytest.mark.parametrize(("oldest", "surplus", "in_flight", "branches"), EVERY_PAIR)
def test_a_killed_run_ends_like_an_uninterrupted_one(
    oldest: int,
    surplus: float,
    in_flight: bool,
    branches: list[float],
    guesser: Path,
    tmp_path: Path,
) -> None:
    changes = {**changes_of(oldest, surplus, in_flight=in_flight), "branches": branches}
    layouts = [make_world(tmp_path / side, guesser, SIZES) for side in ("whole", "killed")]
    whole = run(layouts[0], changes, prepare=prepare)
    assert whole.state.num_steps == 8
    assert [p["branch"] for p in whole.state.curve if p["branch"]] == branches
    assert whole.state.ledger.rollouts["generate"] == sum(SIZES)
    run_with_kills(layouts[1], changes, (2, 5), prepare)
    first, second = (compared(outputs(layout), in_flight=in_flight) for layout in layouts)
    assert first == second


def test_two_resumed_shards_take_the_steps_of_an_uninterrupted_run(
    guesser: Path, tmp_path: Path
) -> None:
    """All settings are combined."""
    case = {"train": {**changes_of(3, 1.5, in_flight=True), "branches": [0.2]}}
    found = []
    for name, parts in (("whole", [6]), ("stopped", [4, 6])):
        layout = sharding.world(tmp_path / name, guesser, case, "fsdp2")
        for num_steps in parts:
            sharding.run(layout, 2, num_steps, tmp_path / f"{name}-{num_steps}", prepare)
        found.append(sharding.sampled(layout))
    assert len(found[0]) > 50
    assert found[0] == found[1]
