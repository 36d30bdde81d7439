"""Multiple-choice questions: options of every published form become lines, and golds letters."""

from pathlib import Path
from typing import Any

import pytest

from tests.ingest.helpers import entry, found, lines
from tests.ingest.test_forms import one

LINES = "Which?\nA. cat\nB. dog\nC. cow"


@pytest.mark.parametrize(
    ("gold", "expected"),
    [
        (["D", "A"], "AD"),
        ("ACD", "ACD"),
        ("A, C and D", "ACD"),
        ('["A", "D"]', "AD"),
        ([0, 3], "AD"),
        (["cat", "owl"], "AD"),
        (["A", "E"], "malformed"),
        ("AAB", "malformed"),
        ([], "malformed"),
    ],
)
def test_several_options_are_correct(tmp_path: Path, gold: Any, expected: str) -> None:
    row = {"q": "Which?", "o": ["cat", "dog", "hen", "owl"], "gold": gold}
    result = one(tmp_path, row, prompt="q", options="o", verifier="choice")
    assert expected in (result[1], result[0])


def test_letters_of_a_prompt_that_shows_its_options(tmp_path: Path) -> None:
    row = {"q": "Which?\nA. cat\nB. dog\nC. hen", "gold": ["A", "C"]}
    assert one(tmp_path, row, prompt="q", verifier="choice") == (row["q"], "AC")
    assert one(tmp_path, row, prompt="q", verifier="math")[0] == "malformed"
    for gold in (["cat"], [0, 2], ["1", "3"]):
        bad = one(tmp_path, {**row, "gold": gold}, prompt="q", verifier="choice")
        assert bad[0] == "malformed"


@pytest.mark.parametrize(
    ("options", "gold", "first", "expected"),
    [
        (["cat", "dog", "hen", "owl"], 4, 1, "D"),
        (["cat", "dog", "hen", "owl"], [1, 3], 1, "AC"),
        (["cat", "dog", "hen", "owl"], 0, 1, "none of the options"),
        (["cat", "dog", "hen", "owl"], 4, None, "if positions count from 1, set `first_option: 1`"),
        ({"1": "cat", "2": "dog", "3": "hen", "4": "owl"}, 4, None, "D"),
        (["1) cat", "2) dog", "3) hen", "4) owl"], 4, None, "D"),
        (["(1) cat", "(2) dog"], "(2)", None, "B"),
        (["1) cat", "2) dog"], 1, 0, "B"),
        (["1", "0"], "1", 0, "B"),
        ([15, 25, 35], 25, None, "B"),
        (["1.5", "2.5", "3.5"], "2.5", None, "B"),
        (["1:2", "2:3", "3:4"], "2:3", None, "B"),
        (["cat", "dog"], "cow", None, "none of the options"),
        (["1", "0"], "1", None, "the text of option A and means option B"),
        (["C", "G", "A", "T"], "A", None, "the text of option C and means option A"),
        ([1, 2, 3, 4], 3.0, None, "the text of option C and means option D"),
        ({"text": ["cat", "dog"], "label": ["1", "2"]}, 0, None, "none of the options"),
        ({"text": ["cat", "dog"], "label": ["A", "B", "C"]}, "C", None, "a label for each"),
        (["cat", "dog"], "1" * 5000, None, "none of the options"),
        (["cat"], 0, None, "not a list or mapping of 2 to 26"),
        (None, 0, None, "the options are null"),
        ([["a"], ["b"]], 0, None, "not all of them text"),
    ],
)
def test_gold_without_a_matching_option_is_rejected(
    tmp_path: Path, options: Any, gold: Any, first: int | None, expected: str
) -> None:
    row = {"q": "Which?", "o": options, "gold": gold}
    changes = {} if first is None else {"first_option": first}
    result = one(tmp_path, row, prompt="q", options="o", verifier="choice", **changes)
    if len(expected) > 2:
        assert result[0] == "malformed"
        assert expected in result[1]
    else:
        shown = ("A. cat\nB. dog", "A. 1", "A. 1:2\nB. 2:3")
        assert result[0].removeprefix("Which?\n").startswith(shown)
        assert result[1] == expected


@pytest.mark.parametrize(
    ("names", "gold"),
    [
        ("ABCD", "C"),
        ("ABCD", 2),
        (["opt1", "opt2", "opt3"], "opt2"),
        ("xyz", 1),
    ],
)
def test_options_in_fields_keep_their_order_if_the_gold_names_one(
    tmp_path: Path, names: Any, gold: Any
) -> None:
    texts = ["cat", *[None] * (len(names) - 3), "dog", "hen"]
    row = {"q": "Which?", **dict(zip(names, texts, strict=True)), "gold": gold}
    result = one(tmp_path, row, prompt="q", options=list(names), verifier="choice")
    assert result == ("Which?\nA. cat\nB. dog\nC. hen", "B")


@pytest.mark.parametrize(("gold", "first", "letter"), [(1, 0, "B"), ("1", 1, "A")])
def test_number_is_no_gold_if_it_can_be_in_the_name_of_a_field(
    tmp_path: Path, gold: Any, first: int, letter: str
) -> None:
    row = {"q": "Which?", "sol1": "cat", "sol2": "dog", "gold": gold}
    settings = {"prompt": "q", "options": ["sol1", "sol2"], "verifier": "choice"}
    assert "`first_option` to the number that means sol1" in one(tmp_path, row, **settings)[1]
    result = one(tmp_path, row, **settings, first_option=first)
    assert result == ("Which?\nA. cat\nB. dog", letter)


@pytest.mark.parametrize(
    ("options", "gold", "letter"),
    [
        (["cat", "dog", "cow"], 2, "C"),
        (["cat", "dog", "cow"], "(B)", "B"),
        (["cat", "dog", "cow"], "dog", "B"),
        (["A) cat", "B) dog", "C) cow"], "B", "B"),
        (["(A)cat", "(B)dog", "(C)cow"], 0.0, "A"),
        ({"A": "cat", "B": "dog", "C": "cow", "D": None}, "C", "C"),
        ({"text": ["cat", "dog", "cow"], "label": ["1", "2", "3"]}, "2", "B"),
        ("A. cat\nB. dog\nC. cow", "b".upper(), "B"),
    ],
)
@pytest.mark.parametrize("prompt", ["q", "{q}\n{options}"])
def test_options_become_lines_and_the_gold_a_letter(
    tmp_path: Path, prompt: str, options: Any, gold: Any, letter: str
) -> None:
    row = {"q": "Which?", "options": options, "gold": gold}
    found_one = one(tmp_path, row, prompt=prompt, options="options", verifier="choice")
    assert found_one == (LINES, letter)


@pytest.mark.parametrize("texts", ["abcdefg", "0123456", range(7)])
def test_options_in_separate_fields_are_shuffled(tmp_path: Path, texts: Any) -> None:
    """The correct option is in the same field of every row, but must have different letters."""
    names = ("right", "b", "c")
    rows = [
        {"q": f"Which {n}?", **{name: texts[(n + place) % 7] for place, name in enumerate(names)}}
        for n in range(7)
    ]
    source = entry(lines(tmp_path / "a.jsonl", *rows), prompt="q", answer="right", options=[*names])
    kept, _ = found(source)
    assert len({row.answer for row in kept}) > 1
    for row, given in zip(kept, rows, strict=True):
        assert f"{row.answer}. {given['right']}" in row.prompt.splitlines()
    assert [row.prompt for row in found(source)[0]] == [row.prompt for row in kept]
    bad = one(tmp_path, {**rows[0], "b": "\ud800"}, prompt="q", answer="right", options=[*names])
    assert bad[0] == "undecodable"
