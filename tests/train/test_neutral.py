"""Neutral settings of a method: the run equals one without the method."""

from pathlib import Path
from typing import Any

import pytest

from tests.train.worlds import make_world, outputs, run

CLIP = {"loss": {"method": "clip"}}
RAW = {"advantage": {"method": "raw", "wrong": -1}}  # never 0, so all rollouts are computed
REFERENCE = {"kl_coefficient": 0.1}
SEVERAL = {"updates": {"epochs": 3, "minibatches": 2}}
PAIRS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "a gate that never closes": (
        {**SEVERAL, **CLIP},
        {**SEVERAL, "loss": {"method": "dgg", "limit": 1e9}},
    ),
    "a gate in the only epoch": (CLIP, {"loss": {"method": "dgg", "limit": 1e-9}}),
    "a bonus that never acts": (
        RAW,
        {**RAW, "loss": {"method": "clip", "entropy": {"coefficient": 1.0, "target": 1e-9}}},
    ),
    "a reference that is never reset": (
        REFERENCE,
        {**REFERENCE, "reference": {"reset_every": 1000}},
    ),
    "experience without a share": (
        {"loss": {"method": "shaped"}},
        {
            "loss": {"method": "shaped"},
            "control": {"method": "experience", "share": 0.0, "start": 0.0},
            "replay": {"method": "successes"},
        },
    ),
}
SHAPES: list[dict[str, Any]] = [
    {"method": "novelty", "weight": 0.0},
    {"method": "pruned_po", "drop": 0.0},
    {"method": "cppo", "drop": 0.0},
    {"method": "kondo", "keep": 1.0},
    {"method": "nat", "whole": 1.0},
    {"method": "nll", "weight": 0.0},
    {"method": "gdro", "eta": 0.0},
]


@pytest.mark.parametrize("name", PAIRS)
def test_a_neutral_setting_changes_nothing(name: str, guesser: Path, tmp_path: Path) -> None:
    found = []
    for number, changes in enumerate(PAIRS[name]):
        layout = make_world(tmp_path / str(number), guesser, [4, 2, 6] * 6)
        run(layout, {"learning_rate": 1e-2, **changes})
        found.append(outputs(layout))
    assert found[0] == found[1]


def test_neutral_shapes_change_no_weight(guesser: Path, tmp_path: Path) -> None:
    """They can cost a pass over the rollouts, or drop those of advantage 0."""
    found = []
    for number, shape in enumerate([[], SHAPES]):
        layout = make_world(tmp_path / str(number), guesser, [4] * 9)
        steps = run(layout, {"shape": shape}).state.steps
        assert sum(row["num_updates"] for row in steps) > 1
        found.append(outputs(layout)["weights"])
    assert found[0] == found[1]
