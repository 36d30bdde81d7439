"""Modelled seconds of a run's rows: they include every pass of the trainer."""

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from flows.benchmark.cells import (
    LENGTH_FACTOR,
    Passes,
    computed_share,
    device_seconds,
    passes_of,
    prepare_family,
    scoring_seconds,
)
from tasks.common.accounting.device_time import DeviceTime
from tasks.common.artifacts import PROMPTS, TRAIN_ROLLOUTS
from tasks.common.recipes import names
from tasks.common.recipes import recipe as recipe_of
from tests.parameters import every_value

VALUES = every_value()
M2PO = {"m2po": 0.04}
TWICE = {"epochs": 2, "minibatches": 1}
PRESENT = {"ratio_to": "sampler", "reject": {"policy": "present"}}  # tests no old policy
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
        (Passes(epochs=3, num_scorings=1), [10, 20, 40, 80], [], [], [10, 80] * 3),
        (Passes(num_scorings=1, has_norms=True), [10, 20, 40, 80], [10, 20, 40, 80], [], [10, 80]),
        (Passes(num_scorings=2), [10, 20, 40, 80] * 2, [], [], [10, 80]),
        # every kept row has a gradient, by its KL term; the reference may be twice as large
        (Passes(reference=1.0), [], [], [10, 20, 80], [10, 20, 80]),
        (Passes(reference=2.0), [], [], [10, 20, 80] * 2, [10, 20, 80]),
        # prompts of 4 and 32 tokens; half of the completions' 6 and 48
        (Passes(cut=0.5), [], [], [], [7, 56]),
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


def test_prompts_without_a_gradient_cost_a_third() -> None:
    """The prompts of the updated rows have 4 and 32 tokens."""
    found = device_seconds(table(), Passes(prompt_gradient=False), DeviceTime()).update
    whole, prompts = DeviceTime().update(scaled(10, 80)), DeviceTime().update(scaled(4, 32))
    assert found == pytest.approx(whole - 2 / 3 * prompts)


def test_the_share_of_cut_completions_follows_from_the_updated_tokens() -> None:
    """The kept rows have prompts of 88 tokens in all, and completions of 132."""
    assert computed_share(table(), Passes(), 220.0) == 1.0
    assert computed_share(table(), Passes(epochs=2), 2 * (88 + 99.0)) == 0.75
    assert computed_share(table(), Passes(), 500.0) == 1.0  # with a warm start


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
        ("grpo", {"kl_coefficient": 0.1}, Passes(reference=1.0)),
        ("grpo", {"loss": BONUS}, Passes(has_bonus=True)),
        ("grpo", {"prompt_gradient": False}, Passes(prompt_gradient=False)),
        ("f_tis", {}, Passes(num_scorings=1)),
        ("value_probe", {}, Passes(num_scorings=1)),
        ("clip_cov", {}, Passes(num_scorings=1)),
        ("clip_cov", {"correction": M2PO}, Passes(num_scorings=1)),
        ("m2po", {}, Passes(num_scorings=1)),
        ("m2po", {"correction": {**M2PO, "proximal": {}}}, Passes(num_scorings=2)),
        ("kondo", {}, Passes()),
        ("a_star_po", {}, Passes(reference=1.0)),
        ("vcpo", {}, Passes(num_scorings=1, has_norms=True)),
        ("grpo_4_updates", {}, Passes(num_scorings=1)),
        ("grpo", {"updates": TWICE}, Passes(epochs=2, num_scorings=1)),
        ("grpo", {"updates": TWICE, "correction": PRESENT}, Passes(epochs=2)),
    ],
)
def test_the_passes_of_a_recipe_follow_from_its_slots(
    recipe: str, change: dict[str, Any], expected: Passes
) -> None:
    train = {**recipe_of(VALUES, recipe)["train"], **change}
    assert passes_of(train, PROMPTS.frame([]), 100) == expected


@pytest.mark.parametrize("recipe", names(VALUES))
def test_the_passes_of_every_recipe_can_be_counted(recipe: str) -> None:
    passes_of(recipe_of(VALUES, recipe)["train"], PROMPTS.frame([]), 100)


def test_a_teacher_counts_by_its_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tasks.train.needs.num_parameters", lambda folder: 250)
    train = recipe_of(VALUES, "distil")["train"]
    assert passes_of(train, PROMPTS.frame([]), 100).reference == 2.5


def test_a_familys_stage_runs_again_after_a_change_of_its_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[str] = []
    code = dict.fromkeys(("ingest", "policy", "profile", "allocate", "train", "evaluate"), "a")
    values = dict(code)
    monkeypatch.setattr("flows.benchmark.cells.run_stage", lambda name, *_: made.append(name))
    monkeypatch.setattr("flows.benchmark.cells.inputs_of", lambda *_: (values, code))

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
