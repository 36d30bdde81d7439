"""The profile of a hand-made set of graded rollouts."""

import sqlite3
from pathlib import Path

import pytest

from tasks.common.accounting.success import without_success
from tasks.common.artifacts import PROMPTS, ROLLOUTS
from tasks.profile.profile import profile_prompts, summarize
from tasks.profile.sources import by_source, repetitions
from tests.stages import run_stage
from tests.train.worlds import make_world


def rollout(prompt_id: str, index: int, outcome: str, tokens: int = 5) -> dict[str, object]:
    finish = "length" if outcome == "truncated" else "stop"
    return {
        **ROLLOUTS.example,
        "prompt_id": prompt_id,
        "sample_index": index,
        "outcome": outcome,
        "reward": float(outcome == "correct"),
        "finish_reason": finish,
        "prompt_tokens": 9,
        "completion_tokens": tokens,
    }


def test_counts_rates_and_intervals_by_hand() -> None:
    outcomes = {
        "b": ["correct", "correct", "wrong", "wrong", "unparsed", "truncated", "timeout", "wrong"],
        "a": ["correct", "wrong", "error", "error"],
        "c": ["error", "error"],
    }
    rows = [
        rollout(name, i, outcome, tokens=i + 1)
        for name, all_ in outcomes.items()
        for i, outcome in enumerate(all_)
    ]
    profile = profile_prompts(ROLLOUTS.frame(rows))
    b, a, c = profile.to_dicts()
    assert [row["prompt_id"] for row in (b, a, c)] == ["b", "a", "c"]
    assert [
        b[name] for name in ("correct", "wrong", "unparsed", "truncated", "timeout", "error")
    ] == [2, 3, 1, 1, 1, 0]
    assert (b["num_samples"], b["pass_rate"], b["truncated_rate"]) == (8, 0.25, 0.125)
    assert (b["completion_tokens"], b["completion_tokens_max"], b["prompt_tokens"]) == (36, 8, 9)
    assert b["pass_rate_low"] == pytest.approx(0.0715, abs=1e-4)
    assert b["pass_rate_high"] == pytest.approx(0.5907, abs=1e-4)
    # errors do not count
    assert (a["num_samples"], a["error"], a["pass_rate"]) == (4, 2, 0.5)
    assert (c["pass_rate"], c["pass_rate_low"]) == (None, None)
    summary = summarize(profile)
    assert summary["num_ungraded"] == 1
    assert summary["histogram"] == [[0.25, 1], [0.5, 1]]


def test_sources_by_hand() -> None:
    """Of the three sums, two have the gold 7. The prompt `d` is of another source, and `e` has no
    graded sample."""
    outcomes = {
        "a": ["correct", "correct"],
        "b": ["wrong", "truncated"],
        "c": ["correct", "wrong"],
        "d": ["wrong", "wrong"],
        "e": ["error", "error"],
    }
    texts = {"b": ["8", "8"], "d": ["1", "2"]}
    rows = [
        {**rollout(name, n, outcome), "text": texts.get(name, ["7", "9"])[n]}
        for name, all_ in outcomes.items()
        for n, outcome in enumerate(all_)
    ]
    table = ROLLOUTS.frame(rows)
    golds = {"a": ("7", "sums"), "b": ("3", "sums"), "c": ("7", "sums")}
    prompts = PROMPTS.frame(
        [
            {**PROMPTS.example, "prompt_id": name, "answer": gold, "source": source}
            for name in outcomes
            for gold, source in [golds.get(name, ("x", "words"))]
        ]
    )
    sums, words = by_source(prompts, profile_prompts(table), repetitions(table)).values()
    assert sums == {
        "num_prompts": 3,
        "pass_rate_mean": 0.5,
        "never_solved_rate": pytest.approx(1 / 3),
        "always_solved_rate": pytest.approx(1 / 3),
        "successes": [1, 1, 1],
        "constant_answer": "7",
        "constant_rate": pytest.approx(2 / 3),
        "truncated_rate": pytest.approx(1 / 6),
        "repeated_rate": pytest.approx(1 / 6),
    }
    assert (words["num_prompts"], words["successes"], words["repeated_rate"]) == (1, [1, 0, 0], 0.0)


def test_larger_groups_are_forecast_to_be_mixed_more_often() -> None:
    rows = [
        rollout(f"p{p}", i, "correct" if i < p else "wrong") for p in range(9) for i in range(8)
    ]
    summary = summarize(profile_prompts(ROLLOUTS.frame(rows)))
    assert (summary["never_solved"], summary["always_solved"]) == (1, 1)
    assert summary["pass_rate_mean"] == 0.5
    rates = list(summary["mixed_rate"].values())
    assert rates == sorted(rates)
    # uniform counts over 0..8 correspond to a flat prior, for which a pair is mixed with
    # probability 1/3
    assert summary["mixed_rate"]["2"] == pytest.approx(1 / 3, abs=0.03)


def test_a_profile_without_a_success_is_stated_in_log_and_mlflow(
    guesser: Path, tmp_path: Path
) -> None:
    """The policy answers with one or two digits."""
    root = make_world(tmp_path, guesser, [4, 4], answer="12345").root
    result = run_stage("profile", root / "params.yaml", root)
    assert result.returncode == 0
    assert "because no sample of the profile is correct: of 48 samples " in result.output
    with sqlite3.connect(root / "tracking" / "mlflow.db") as database:
        query = "select value from tags where key = 'mlflow.note.content'"
        ((note,),) = database.execute(query).fetchall()
    assert note in result.output


@pytest.mark.parametrize(
    ("outcomes", "remedy"),
    [
        ({"correct": 0, "wrong": 3, "truncated": 5}, "raise sampling.max_tokens, which"),
        ({"correct": 0, "wrong": 1, "unparsed": 5}, "change the prompt or the verifier, which"),
        ({"correct": 0, "wrong": 5, "error": 1}, "choose easier prompts or a better policy."),
        ({"correct": 1, "truncated": 7}, ""),
        ({}, ""),
    ],
)
def test_the_remedy_is_that_of_the_most_frequent_outcome(
    outcomes: dict[str, int], remedy: str
) -> None:
    assert remedy in without_success(outcomes)
    assert bool(without_success(outcomes)) == bool(remedy)
