"""Modelled seconds of a run's rows: they include every pass of the trainer."""

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from tasks.benchmark.cells import (
    LENGTH_FACTOR,
    Passes,
    device_seconds,
    passes_of,
    prepare_family,
    scoring_seconds,
)
from tasks.common.accounting.device_time import DeviceTime
from tasks.common.artifacts import PROMPTS, TRAIN_ROLLOUTS
from tasks.common.recipes import recipe as recipe_of
from tests.parameters import every_value

VALUES = every_value()
BONUS = {"method": "clip", "entropy": {"coefficient": 0.01}}


def table() -> pl.DataFrame:
    """Return a mixed group, a kept dead one, one that is not kept, and a replayed one, with rows of
    10, 20, 40 and 80 tokens."""
    kinds = [(1.0, True, False), (0.0, True, False), (0.0, False, False), (-1.0, True, True)]
    return TRAIN_ROLLOUTS.frame(
        [
            {
                **TRAIN_ROLLOUTS.example,
                "step": 0,
                "group": group,
                "sample_index": place,
                "kept": kept,
                "advantage": advantage,
                "replayed": replayed,
                "prompt_tokens": 4 * 2**group,
                "token_ids": [1] * (6 * 2**group),
            }
            for group, (advantage, kept, replayed) in enumerate(kinds)
            for place in range(2)
        ]
    )


def scaled(*tokens: int) -> Any:
    return np.repeat(np.array(tokens) * int(LENGTH_FACTOR), 2)


@pytest.mark.parametrize(
    ("passes", "seen", "norms", "kept", "updated"),
    [
        (Passes(), [], [], [], [10, 80]),
        (Passes(epochs=3, is_seen=True), [10, 20, 40, 80], [], [], [10, 80] * 3),
        (Passes(is_seen=True, has_norms=True), [10, 20, 40, 80], [10, 20, 40, 80], [], [10, 80]),
        # every kept row has a gradient, by its KL term
        (Passes(has_reference=True), [], [], [10, 20, 80], [10, 20, 80]),
    ],
)
def test_modelled_seconds_are_those_of_all_passes(
    passes: Passes, seen: list[int], norms: list[int], kept: list[int], updated: list[int]
) -> None:
    time_of = DeviceTime()
    found = device_seconds(table(), passes, time_of)
    score = time_of.read(scaled(*seen)) + time_of.update(scaled(*norms))
    assert found.score == pytest.approx(score + time_of.read(scaled(*kept)))
    assert found.update == pytest.approx(time_of.update(scaled(*updated)))
    plain = device_seconds(table(), Passes(), time_of)
    assert (found.decode, found.prefill) == (plain.decode, plain.prefill)


def test_other_scored_tokens_have_the_lengths_of_the_rollouts() -> None:
    time_of = DeviceTime()
    whole = scoring_seconds(300.0, table(), time_of)  # the number of tokens in the table
    assert whole == pytest.approx(time_of.read(scaled(10, 20, 40, 80)))
    assert scoring_seconds(0.0, table(), time_of) == 0.0


@pytest.mark.parametrize(
    ("recipe", "change", "expected"),
    [
        ("grpo", {}, Passes()),
        ("replay", {}, Passes()),
        ("grpo", {"kl_coefficient": 0.1}, Passes(has_reference=True)),
        ("grpo", {"loss": BONUS}, Passes(has_bonus=True)),
        ("f_tis", {}, Passes(is_seen=True)),
        ("value_probe", {}, Passes(is_seen=True)),
        ("clip_cov", {}, Passes(is_seen=True)),
        ("kondo", {}, Passes()),
        ("vcpo", {}, Passes(is_seen=True, has_norms=True)),
        ("grpo_4_updates", {}, Passes(is_seen=True)),
        ("grpo", {"updates": {"epochs": 2, "minibatches": 1}}, Passes(epochs=2, is_seen=True)),
    ],
)
def test_the_passes_of_a_recipe_follow_from_its_slots(
    recipe: str, change: dict[str, Any], expected: Passes
) -> None:
    train = {**recipe_of(VALUES, recipe)["train"], **change}
    assert passes_of(train, PROMPTS.frame([])) == expected


def test_a_familys_stage_runs_again_after_a_change_of_its_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    code = dict.fromkeys(("ingest", "policy", "profile", "allocate", "train", "evaluate"), "a")
    values = dict(code)
    monkeypatch.setattr("tasks.benchmark.cells.run_stage", lambda name, *_: made.append(name))
    monkeypatch.setattr("tasks.benchmark.cells.inputs_of", lambda *_: (values, code))

    def again(**changed: str) -> list[str]:
        made.clear()
        code.update(changed)
        prepare_family(tmp_path, "small", VALUES, None)
        return list(made)

    assert again() == ["policy", "ingest", "profile", "evaluate"]
    assert again() == []
    assert again(train="b") == []
    assert again(profile="b") == ["profile", "evaluate"]
    values["evaluate"] = "b"
    assert again() == ["evaluate"]
    assert again(ingest="b") == ["ingest", "profile", "evaluate"]
