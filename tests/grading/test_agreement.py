"""Agreement with other graders, on real cases and on labelled real completions."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tasks.grading.grader import Answer, Grader
from tasks.grading.settings import Verify
from tests.bench import agreement

pytestmark = pytest.mark.real_data


def grade(answers: list[Answer]) -> list[str]:
    with Grader(Verify(2, 5.0, 4.0, 1.0, agreement.CONFIGURED)) as grader:
        return [verdict.outcome for verdict in grader.grade(answers)]


def read(folder: Path, name: str) -> list[dict[str, Any]]:
    return agreement.read(folder / "rollouts" / name)


def test_verdicts_on_real_cases_agree(real_data: Path) -> None:
    results = list(agreement.compare(agreement.read(real_data / "verifier_cases.jsonl")))
    assert [result for result in results if result[2] is False] == []
    compared = Counter(
        policy.split(":")[0].split(" ")[0] for policy, _, agrees, _ in results if agrees
    )
    assert compared["math_verify"] == 53 + 7
    assert compared.total() == 245


def test_verdicts_agree_with_labels_of_gsm8k_solutions(real_data: Path) -> None:
    rows = read(real_data, "gsm8k_openai_model_solutions.jsonl")
    solved = [
        (row["ground_truth"], part)
        for row in rows
        for part in row.values()
        if isinstance(part, dict)
    ]
    outcomes = grade([Answer("numeric", part["solution"], gold, False) for gold, part in solved])
    assert len(outcomes) == 2640
    assert [o == "correct" for o in outcomes] == [part["is_correct"] for _, part in solved]


@pytest.mark.parametrize("verifier", ["math", "hendrycks"])
def test_verdicts_agree_with_correct_labels_of_math_completions(
    real_data: Path, verifier: str
) -> None:
    """Upstream, the gold `10{,}000` and the answer 10000 are different numbers."""
    rows = read(real_data, "qwen25math_math100x8.jsonl")
    labelled = [
        (row, text, label)
        for row in rows
        for text, label in zip(row["code"], row["score"], strict=True)
    ]
    outcomes = grade([Answer(verifier, text, row["gt"], False) for row, text, _ in labelled])
    differing = [
        (row["idx"], row["gt"], outcome)
        for (row, _, label), outcome in zip(labelled, outcomes, strict=True)
        if (outcome == "correct") is not label
    ]
    assert (len(outcomes), differing) == (400, [(72, "10{,}000", "correct")])


def test_verdicts_agree_with_labels_of_tagged_completions(real_data: Path) -> None:
    """For complete texts, only the verdict on `(3, π/2)` differs, which the other grader cannot
    read. Some texts without an answer have positive labels; of all texts, nine in ten agree."""
    rows = read(real_data, "pods_labelled_completions.jsonl")
    outcomes = grade(
        [Answer("math_in_answer", row["completion"], row["gold"], False) for row in rows]
    )
    differing: dict[bool, list[tuple[dict[str, Any], str]]] = {True: [], False: []}
    for row, outcome in zip(rows, outcomes, strict=True):
        if (outcome == "correct") is not row["correct"]:
            differing["</answer>" in row["completion"]].append((row, outcome))
    assert len(rows) == 360
    assert {(row["gold"], outcome) for row, outcome in differing[True]} == {
        (r"\left( 3, \frac{\pi}{2} \right)", "correct")
    }
    assert all("(3, π/2)" in row["completion"] for row, _ in differing[True])
    assert len(differing[False]) <= 14
