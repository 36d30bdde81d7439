"""The state of every method: a killed run resumes, and ends like one that was not killed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tasks.common.accounting.spending import CellBudget
from tasks.train.loop.trainer import Trainer
from tests.train.test_experience import CHANGES as EXPERIENCE
from tests.train.test_multi_turn import GENERATE
from tests.train.test_whole_runs import changes_of
from tests.train.worlds import check_kills

SIZES = [4, 2, 6] * 6  # six steps of three groups
DECAY = {"branches": [0.5], "decay_share": 0.4}
RESET = {"kl_coefficient": 0.1, "reference": {"reset_every": 2}}
SNAPSHOT = {"max_staleness": 3, "correction": {"proximal": {"method": "snapshot"}}}
# a case has methods of several slots, since each has a state of its own
CASES: dict[str, dict[str, Any]] = {
    "adapters": {"lora": {"rank": 4, "alpha": 8.0}},
    "turns, ahead": {"generate": GENERATE, "max_staleness": 3},
    "winnow": changes_of("winnow"),
    "dapo, ahead": {**changes_of("dapo"), "max_staleness": 1},
    "dots_replay, ahead": {**changes_of("dots_replay"), "max_staleness": 3},
    "profile_replay, ahead": {**changes_of("profile_replay"), "max_staleness": 3},
    "knapsack, surplus": {**changes_of("knapsack"), "max_staleness": 1, "over_provision": 1.5},
    "sagc, m2po": {**changes_of("sagc"), "correction": {"m2po": 1e-4}, "max_staleness": 1},
    "experience, ahead": {**EXPERIENCE, "max_staleness": 2, "updates": {"minibatches": 2}},
    "value_probe": changes_of("value_probe"),
    "vcpo, dps": {**changes_of("vcpo"), "control": {"method": "dps"}},
    "a_star": {
        "advantage": {"method": "a_star", "beta": 0.5},
        "loss": {"method": "regression", "beta": 0.1},
        "updates": {"minibatches": 2},
    },
    "dgg": {
        "loss": {"method": "dgg", "limit": 0.2, "window": 4},
        "updates": {"epochs": 3, "minibatches": 2},
    },
    "entropy, greso": {
        **changes_of("greso"),
        "loss": {"method": "clip", "entropy": {"coefficient": 0.1, "target": 10.0, "step": 0.05}},
        "updates": {"minibatches": 2},
    },
    "gdro": {
        "control": {"method": "gdro"},
        "shape": [{"method": "truncated"}, {"method": "gdro", "width": 0.3}, {"method": "gdro"}],
    },
    "noise_scale": {"control": {"method": "noise_scale", "memory": 0.5, "first": 2}},
    "kl_cov, coverage": {
        "replay": {"method": "coverage", "capacity": 3, "n": 2},
        "loss": {"method": "kl_cov", "share": 0.2},
        "updates": {"epochs": 2, "minibatches": 2},
    },
    # old policies and references
    "snapshot, branch": {**SNAPSHOT, **DECAY},
    "ewma, branch": {**SNAPSHOT, **DECAY, "correction": {"proximal": {"method": "ewma"}}},
    "reset, branch": {**RESET, **DECAY, "updates": {"epochs": 2}},
}


def replays(trainer: Trainer) -> bool:
    return sum(row["num_replayed"] for row in trainer.state.steps) > 1


HAS_EFFECT: dict[str, Callable[[Trainer], bool]] = {
    "coverage": replays,
    "experience": replays,
    "a_star": lambda trainer: trainer.state.steps[-1]["kl"] > 0,
    "dgg": lambda trainer: len({row["num_updates"] for row in trainer.state.steps}) > 1,
    "entropy": lambda trainer: trainer.slots.loss.state.coefficient > 0.5,
    "kl_cov": lambda trainer: max(row["clip_rate"] or 0.0 for row in trainer.state.steps) > 0,
    "noise_scale": lambda trainer: trainer.slots.control.state.steps > 2,
    "gdro": lambda trainer: trainer.slots.shape[1].state.steps.sum() > 5,
}


@pytest.mark.parametrize("name", CASES)
def test_a_killed_run_ends_like_an_uninterrupted_one(
    name: str, guesser: Path, tmp_path: Path
) -> None:
    whole = check_kills(tmp_path, guesser, SIZES, {"learning_rate": 1e-2, **CASES[name]})
    for part in name.split(", "):
        assert HAS_EFFECT.get(part, lambda trainer: True)(whole), part


@pytest.mark.parametrize(
    "changes",
    [
        {"max_staleness": 2, "over_provision": 1.5},
        {"control": {"method": "dapo"}, "select": {"method": "mixed"}},
        {"replay": {"method": "recent", "share": 0.5}},
    ],
    ids=lambda changes: "-".join(changes),
)
def test_a_killed_run_with_a_budget_ends_like_an_uninterrupted_one(
    changes: dict[str, Any], guesser: Path, tmp_path: Path
) -> None:
    """The budget is larger than the plan of four steps."""
    budget = CellBudget("rollouts", 100, 0.0)
    whole = check_kills(tmp_path, guesser, [4] * 12, changes, (1, 5), budget)
    assert len(whole.state.steps) > 4
    assert whole.budget.spent == pytest.approx(100, abs=4)
