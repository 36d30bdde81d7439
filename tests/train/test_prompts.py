"""The training prompts as columns, which are tokenized on request."""

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import polars as pl
import pytest

from tasks.common.artifacts import PLAN, PROMPTS
from tasks.common.files import ArtifactError
from tasks.engines.settings import Sampling
from tasks.train.data.plan import read_plan
from tasks.train.data.prompts import Prompts
from tasks.train.trainers import own as training
from tests.policies import ENGINE
from tests.train.steps import BATCH, passes_of, profile_of
from tests.train.worlds import make_trainer, make_world, sampled


def test_vllm_has_space_for_the_longest_planned_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    """The validation prompts count as well, since every validation samples all of them."""

    def prompts(*lengths: int) -> Prompts:
        rows = [
            {**PROMPTS.example, "prompt_id": f"p{place}", "prompt": "x" * length}
            for place, length in enumerate(lengths)
        ]
        return Prompts(
            PROMPTS.frame(rows), lambda table: [list(map(ord, text)) for text in table["prompt"]]
        )

    def longest(engine: str, validation: int) -> int | None:
        sections: Any = SimpleNamespace(
            engine=replace(ENGINE, name=engine), sampling=Sampling(max_tokens=100)
        )
        plan = passes_of(2, 4, 3)
        return training.longest_sample(plan, prompts(3, 7, 50), prompts(validation), sections)

    assert longest("vllm", 2) == longest("server", 2) == 107
    assert longest("vllm", 9) == 109
    assert longest("hf", 2) is None
    monkeypatch.setattr(training, "MAX_ENCODED", 1)
    assert longest("vllm", 2) is None


def test_a_prompt_that_is_too_long_is_refused_when_it_is_sampled(
    guesser: Path, tmp_path: Path
) -> None:
    layout = make_world(tmp_path, guesser, [4, 4, 4, 4])
    path = layout.prompts("train")
    long = pl.when(pl.col("prompt_id") == "p2").then(pl.lit("1" * 600)).otherwise("prompt")
    PROMPTS.write(path, PROMPTS.read(path).with_columns(prompt=long))
    trainer = make_trainer(layout, batch={"unit": "prompts", "size": 2, "counts": "generated"})
    with closing(trainer.collector.grader):
        sampled(trainer)  # p0 and p1
        with pytest.raises(ArtifactError, match="prompt p2 has 600 tokens"):
            sampled(trainer)


def test_a_run_without_validation_prompts_is_refused(guesser: Path, tmp_path: Path) -> None:
    layout = make_world(tmp_path, guesser, [4, 4, 4, 4])
    path = layout.prompts("validation")
    PROMPTS.write(path, PROMPTS.read(path).head(0))
    with pytest.raises(ArtifactError, match=r"validation.parquet has no prompts, but train measu"):
        make_trainer(layout)


def test_a_plan_refers_to_prompts_by_row() -> None:
    visit = {"visit": 0, "pass": 0, "phase": 0, "order": 0, "group_size": 2}
    table = PLAN.frame([{**visit, "prompt_id": name} for name in ("c", "a", "c", "b")])
    ids = pl.Series(["a", "b", "c"])
    assert read_plan(table, ids, BATCH).prompt_rows_V.tolist() == [2, 0, 2, 1]
    with pytest.raises(ArtifactError, match="visits prompt b, which is not among"):
        read_plan(table, ids.filter(ids == "a"), BATCH)


# --- the profile's samples


OUTCOMES = {
    "p2": ["wrong", "correct", "error"],
    "p0": ["correct", "correct", "error"],
    "p1": ["wrong", "truncated", "correct"],
}


def test_counts_follow_the_training_rows_and_exclude_errors() -> None:
    correct, graded = profile_of(OUTCOMES).correct()
    assert correct.tolist() == [2, 1, 1, 0]
    assert graded.tolist() == [2, 3, 2, 0]


def test_mixed_prompts_follow_the_order_of_the_plan() -> None:
    assert profile_of(OUTCOMES).mixed_prompts().tolist() == [2, 1]
    assert profile_of({}).mixed_prompts().tolist() == []


def test_the_profiles_rollouts_are_groups_of_the_initial_policy() -> None:
    rollouts = profile_of(OUTCOMES).rollouts(np.array([1, 2]))
    assert rollouts.group_B.tolist() == [0, 0, 0, 1, 1]
    columns = {name: rollouts.table[name].to_list() for name in rollouts.table.columns}
    assert columns["prompt"] == [[7, 7]] * 3 + [[7, 7, 7]] * 2
    assert columns["token_ids"] == [[0], [10, 11], [20, 21, 22], [0], [10, 11]]
    assert columns["reason"] == ["stop", "length", "stop", "stop", "stop"]
    assert columns["outcome"] == ["wrong", "truncated", "correct", "wrong", "correct"]
    assert rollouts.rewards_B.tolist() == [0.0, 0.0, 1.0, 0.0, 1.0]
    assert rollouts.replayed_B.all()
    assert (rollouts.versions_B == 0).all()
    missing = [bool(np.isnan(row).all()) for row in columns["logprobs"]]
    assert missing == [True, False, False, True, False]


def test_a_profile_of_other_prompts_is_refused() -> None:
    stranger = profile_of({"p9": ["correct"]})
    with pytest.raises(ArtifactError, match="samples of prompt p9, .* run allocate again"):
        stranger.correct()
