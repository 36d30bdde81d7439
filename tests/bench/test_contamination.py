"""Test the measure of contamination: its comparison, and the results of the search by it."""

import json
import random
from functools import cache
from pathlib import Path

import pytest

from tests.bench.contamination import CHANGES, common_length, common_pairs, made


def test_the_common_subsequence_is_the_longest() -> None:
    rng = random.Random(0)

    def slow(one: list[str], other: list[str]) -> int:
        @cache
        def best(n: int, k: int) -> int:
            if not n or not k:
                return 0
            if one[n - 1] == other[k - 1]:
                return best(n - 1, k - 1) + 1
            return max(best(n - 1, k), best(n, k - 1))

        return best(len(one), len(other))

    for _ in range(50):
        one, other = (rng.choices("abcd", k=rng.randint(1, 12)) for _ in range(2))
        assert common_length(one, other) == slow(one, other)


def test_common_pairs_are_found_among_all_pairs() -> None:
    question = "a farmer has 12 cows and 30 sheep on the hill how many animals are there"
    others = [question + " in all", "how many cows has the farmer", question.replace("12", "13")]
    assert common_pairs([question], others) == {(0, 0): 1.0, (0, 2): pytest.approx(15 / 16)}


@pytest.mark.real_data
def test_real_questions_are_found_with_other_text_around_them(real_data: Path) -> None:
    gsm8k = [json.loads(line)["question"] for line in (real_data / "gsm8k/train.jsonl").open()]
    math = [row["problem"] for row in json.load((real_data / "math_train/math.json").open())]
    rows = made([*gsm8k[::100], *math[::100]], CHANGES)
    assert sum(recall for _, recall, _ in rows) / len(rows) >= 0.95
    assert min(recall for _, recall, _ in rows) >= 0.9
    assert [row for row in rows if row[2]] == []
    assert len(rows) == len(CHANGES)
