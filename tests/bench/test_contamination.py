"""Test the results of the search for contamination by its measure."""

import json
from pathlib import Path

import pytest

from tests.bench.contamination import CHANGES, made


@pytest.mark.real_data
def test_real_questions_are_found_with_other_text_around_them(real_data: Path) -> None:
    gsm8k = [json.loads(line)["question"] for line in (real_data / "gsm8k/train.jsonl").open()]
    math = [row["problem"] for row in json.load((real_data / "math_train/math.json").open())]
    rows = made([*gsm8k[::100], *math[::100]], CHANGES)
    assert sum(recall for _, recall, _ in rows) / len(rows) >= 0.95
    assert min(recall for _, recall, _ in rows) >= 0.9
    assert [row for row in rows if row[2]] == []
    assert len(rows) == len(CHANGES)
