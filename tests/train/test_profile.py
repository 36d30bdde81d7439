"""The profile's samples, as methods read them."""

import numpy as np
import pytest

from tasks.common.artifacts import PROMPTS, SAMPLES
from tasks.common.files import ArtifactError
from tasks.train.profile import Profile
from tasks.train.rollouts import Prompts

OUTCOMES = {
    "p2": ["wrong", "correct", "error"],
    "p0": ["correct", "correct", "error"],
    "p1": ["wrong", "truncated", "correct"],
}
PROMPT_TABLE = PROMPTS.frame(
    [{**PROMPTS.example, "prompt_id": f"p{row}", "prompt": "x" * (row + 1)} for row in range(4)]
)


def profile_of(outcomes: dict[str, list[str]]) -> Profile:
    rows = [
        {
            "prompt_id": prompt_id,
            "sample_index": k,
            "outcome": outcome,
            "reward": float(outcome == "correct"),
            "finish_reason": "length" if outcome == "truncated" else "stop",
            "token_ids": [10 * k + place for place in range(k + 1)],
            "logprobs": [-0.5] * (k + 1) if k else None,
        }
        for prompt_id, all_of_it in outcomes.items()
        for k, outcome in enumerate(all_of_it)
    ]
    encode = lambda table: [[7] * len(text) for text in table["prompt"]]  # noqa: E731
    return Profile(SAMPLES.frame(rows), Prompts(PROMPT_TABLE, encode))


def test_counts_are_by_training_row_and_leave_errors_out() -> None:
    correct, graded = profile_of(OUTCOMES).correct()
    assert correct.tolist() == [2, 1, 1, 0]
    assert graded.tolist() == [2, 3, 2, 0]


def test_mixed_prompts_come_in_the_plans_order() -> None:
    assert profile_of(OUTCOMES).mixed_prompts().tolist() == [2, 1]
    assert profile_of({}).mixed_prompts().tolist() == []


def test_rollouts_are_groups_of_the_initial_policy() -> None:
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
