"""Of duplicate questions one is kept. With two golds none is kept."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.ingest.questions.duplicates import resolve
from tasks.ingest.questions.identity import compared, normalised, prompt_id
from tests.ingest.helpers import row, spool


def fates(
    folder: Path, *questions: tuple[str, str], splits: tuple[str | None, ...] = ()
) -> dict[int, tuple[str, int]]:
    """Return (reason, other row) of each rejected row. With `splits` each question is a separate
    entry."""
    rows = [(n if splits else 0, row(*question)) for n, question in enumerate(questions)]
    index = resolve(spool(folder, *rows).index, splits or (None,))
    return {
        n: (reason, other)
        for n, reason, other in index.select("row", "reason", "other").iter_rows()
        if reason
    }


def test_duplicates_keep_the_first_and_conflicting_golds_keep_none(tmp_path: Path) -> None:
    questions = [
        ("What is  2 + 2?", "4"),
        ("what is 2 + 2? ", "4"),
        ("Is it 3?", "3"),
        ("Is it 3?", "5"),
        ("Is it 3?", "3"),
        ("z^4 - z^2 + 1", "7"),
        ("z^4 + z^2 + 1", "7"),
    ]
    assert fates(tmp_path, *questions) == {
        1: ("duplicate", 0),
        2: ("conflicting_answers", 3),
        3: ("conflicting_answers", 2),
        4: ("conflicting_answers", 3),
    }


def test_questions_that_differ_in_case_do_not_conflict(tmp_path: Path) -> None:
    assert fates(
        tmp_path, ("The code of A?", "65"), ("The code of a?", "97"), ("THE code of A?", "65")
    ) == {2: ("duplicate", 0)}


def test_wrong_gold_in_training_rejects_no_row_of_the_evaluation(tmp_path: Path) -> None:
    right, wrong, other = ("2 + 2?", "4"), ("2 + 2?", "5"), ("2 + 2?", "6")
    splits: tuple[str | None, ...] = ("train", "test", None, "train")
    assert fates(tmp_path / "a", wrong, right, other, right, splits=splits) == {
        0: ("conflicting_answers", 1),
        2: ("conflicting_answers", 1),
        3: ("duplicate", 1),
    }
    # the held-out rows contradict each other: all rows of the question are rejected
    assert fates(tmp_path / "b", right, right, wrong, splits=("train", "test", "validation")) == {
        0: ("conflicting_answers", 2),
        1: ("conflicting_answers", 2),
        2: ("conflicting_answers", 1),
    }
    # rows without a named split may be in any split
    assert fates(tmp_path / "c", right, wrong, splits=("train", None)) == {
        0: ("conflicting_answers", 1),
        1: ("conflicting_answers", 0),
    }


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        (" cafe\u0301\u00a0\n1", "caf\u00e9 1", True),
        ("Find $x$..", "Find $x$.", True),
        ("Is it 3", "Is it 3 ?", True),
        ("Compute 3!", "Compute 3", False),
        ("Find x.5", "Find x5", False),
        ("x.5", "x 5", False),
        ("12", "1 2", False),
        ("-3", "3", False),
        ("{1}", "(1)", False),
        ("x²", "x2", False),
    ],
)
def test_questions_are_compared_without_blanks_and_closing_signs(
    one: str, other: str, same: bool
) -> None:
    assert (compared(one) == compared(other)) == same


@given(st.text())
def test_normalising_twice_equals_normalising_once(text: str) -> None:
    assert normalised(normalised(text)) == normalised(text)


def test_id_of_a_prompt_depends_on_its_content_only() -> None:
    same = prompt_id(row("a"))
    assert same == prompt_id(row("a", line=9, source="elsewhere", content="x", level="3"))
    others = [
        row("b"),
        row("a", "2"),
        row("a", verifier="exact"),
        row("a", messages='[{"role": "user", "content": "a"}]'),
    ]
    assert len({same, *map(prompt_id, others)}) == 5
