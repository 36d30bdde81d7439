"""Training prompts that equal or nearly equal prompts of the evaluation, or are only similar."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tasks.common.params import ParamsError
from tasks.ingest.questions import surroundings
from tasks.ingest.questions.contamination import Common, Index, pairs, shared
from tasks.ingest.questions.identity import question_keys
from tasks.ingest.questions.similarity import numbers_of, tokens_of
from tasks.ingest.settings import Contamination
from tests.ingest.helpers import row, spool

SETTINGS = Contamination(overlap=0.7, ngram=3, same_numbers=True)
NOTHING = Common(np.zeros(0, np.uint64), frozenset())
TRAIN = (
    "A farmer has 12 cows and 30 sheep on the hill. How many animals does the farmer have on the "
    "hill in all?"
)


def search(
    folder: Path, train: list[str], evaluation: list[str], settings: Contamination = SETTINGS
) -> list[tuple[str, str, str, float]]:
    """Return the pairs found, as texts, with their kind and overlap."""
    kept = spool(folder, *map(row, train), *map(row, evaluation))
    index = kept.index
    found = pairs(kept, index[: len(train)], index[len(train) :], settings)
    texts = [*train, *evaluation]
    return [
        (texts[one], texts[two], kind, overlap) for one, two, kind, overlap in found.iter_rows()
    ]


def test_formulas_differ_by_signs_and_numbers(tmp_path: Path) -> None:
    question = "Find the product of all complex roots of the equation {} = 0 on the unit circle."
    train, other = question.format("z^4 - z^2 + 1"), question.format("z^4 + z^2 + 1")
    assert search(tmp_path / "careful", [train], [other]) == []
    careless = Contamination(overlap=0.7, ngram=3, same_numbers=False)
    ((_, _, kind, _),) = search(tmp_path / "careless", [train], [other], careless)
    assert kind == "near"


def test_shared_text_does_not_count_as_overlap(tmp_path: Path) -> None:
    instruction = (
        "Spell the following word backwards, letter by letter, and write nothing else than the "
        "letters: {}"
    )
    words = [f"{a}{b}{a}" for a in "bcdfghklmn" for b in "aeiou"]
    prompts = [instruction.format(word) for word in words]
    assert search(tmp_path, prompts[:40], prompts[40:]) == []


def test_only_equal_prompts_are_found_without_a_threshold(tmp_path: Path) -> None:
    equal_only = Contamination(overlap=None, ngram=3, same_numbers=True)
    near = TRAIN.replace("the hill. How", "a hill. How")
    assert search(tmp_path, [TRAIN, near], [TRAIN.lower()], equal_only) == [
        (TRAIN, TRAIN.lower(), "exact", 1.0)
    ]


def test_search_finds_the_same_as_a_comparison_of_all_pairs(tmp_path: Path) -> None:
    names = ["Ann", "Bob", "Cid", "Dan", "Eve", "Fay", "Gus", "Hal", "Ida", "Jim"]
    things = ["apples", "pears", "plums", "nuts", "figs", "limes"]
    train = [
        f"{name} buys {n} {thing} at the market near {names[n]} and eats {m} of them on the way. "
        "How many are left?"
        for n, name in enumerate(names)
        for m, thing in enumerate(things)
    ]
    evaluation = [question.replace("on the way", "while walking") for question in train[::7]]
    reworded = train[0].replace("on the way", "while running")  # a second copy of one prompt
    found = {(one, two) for one, two, _, _ in search(tmp_path, train, [*evaluation, reworded])}
    assert found == {*zip(train[::7], evaluation, strict=True), (train[0], reworded)}


def test_overlap_is_the_share_of_the_shorter_prompt() -> None:
    words = ["apples", "books", "cats", "dogs", "eggs", "figs", "goats", "hats", "inns", "jars"]
    index = Index([(7, " ".join(words))], NOTHING, SETTINGS)
    assert list(index.search(" ".join([*words, "kites"]))) == [(7, 1.0)]
    # the same words in another order: six and five of eight runs of three words are shared
    assert list(index.search(" ".join([*words[:8], "jars", "inns"]))) == [(7, 0.75)]
    assert list(index.search(" ".join([*words[:7], "jars", "inns", "hats"]))) == []


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ((0.0, 3, True), "overlap is 0.0"),
        ((1.1, 3, True), "overlap is 1.1"),
        ((0.5, 0, True), "ngram is 0"),
    ],
)
def test_settings_out_of_range_are_named(settings: Any, message: str) -> None:
    with pytest.raises(ParamsError, match=message):
        Contamination(*settings)


def test_sums_without_words_are_distinguished() -> None:
    sums = ["2+2", "3+3", "5 + 1", "7+1", "12 - 4", "3 * 9"]
    index = Index(enumerate(sums), NOTHING, SETTINGS)
    assert [[row for row, _ in index.search(text)] for text in sums] == [
        [n] for n in range(len(sums))
    ]


PAIRS = [
    json.loads(line)
    for line in Path(__file__).with_name("near_pairs.jsonl").read_text().splitlines()
]
"""Pairs labelled by hand: `same` where the answer of one is known from the other's text alone,
without solving anything; other numbers, names that matter or another question make another
problem."""


def is_found(train: str, evaluation: str) -> bool:
    """Return whether the training prompt of a pair is found, as equal or as near."""
    if question_keys(train)["folded"] == question_keys(evaluation)["folded"]:
        return True
    index = Index([(0, evaluation)], NOTHING, SETTINGS)
    return bool(list(index.search(train)))


def test_pairs_labelled_by_hand() -> None:
    """The guide has these numbers."""
    leaks = [pair for pair in PAIRS if pair["same"]]
    others = [pair for pair in PAIRS if not pair["same"]]
    assert [pair for pair in others if is_found(pair["train"], pair["evaluation"])] == []
    missed = [pair for pair in leaks if not is_found(pair["train"], pair["evaluation"])]
    # all runs of three words differ
    assert [pair["train"] for pair in missed] == ["Compute $\\sin 60^\\circ$ exactly."]
    guide = Path("docs/guide/data.md").read_text()
    assert f"{len(leaks) - 1} of {len(leaks)} leaks" in guide
    assert f"none of {len(others)} other pairs" in guide


@pytest.mark.parametrize(
    ("one", "other", "is_equal"),
    [
        ("$60^\\circ$ \\cdot 3", "$60^{\\circ}$ * 3", True),
        ("$x \\leq 2.50$", "x ≤ 2.5", True),
        ("10.5", "105", False),
        ("100", "1", False),
        ("1.05", "1.5", False),
        ("(1,200)", "(12,00)", False),
    ],
)
def test_latex_and_numbers_are_normalised(one: str, other: str, is_equal: bool) -> None:
    tokens = [tokens_of(text) for text in (one, other)]
    assert (tokens[0] == tokens[1]) == is_equal
    assert (numbers_of(tokens[0]) == numbers_of(tokens[1])) == is_equal


def test_prompt_of_only_an_instruction_is_compared_whole() -> None:
    assert tokens_of("Express your answer as a fraction.")[0] == "express"
    assert " ".join(tokens_of("(A) 1 (B) 2 (C) 3")) == "( a ) 1 ( b ) 2 ( c ) 3"


CHANGES: dict[str, Callable[[str], str]] = {
    "instructions": lambda text: (
        f"Solve this problem carefully. {text} Please reason step by step, and put your final "
        "answer within \\boxed{}."
    ),
    "points before": lambda text: "[20] " + text,
    "no dollar signs": lambda text: text.replace("$", ""),
    "other LaTeX": lambda text: (
        text.replace("\\frac", "\\dfrac").replace("\\left", "").replace("\\right", "")
    ),
}


@pytest.fixture(scope="module")
def real(real_data: Path) -> tuple[list[str], Index]:
    """Return real questions and their index."""
    gsm8k = [json.loads(line)["question"] for line in (real_data / "gsm8k/train.jsonl").open()]
    math = [row["problem"] for row in json.load((real_data / "math_train/math.json").open())]
    questions = [*gsm8k[::50], *math[::50]]
    return questions, Index(enumerate(questions), shared([*gsm8k[::4], *math[::4]], 3), SETTINGS)


@pytest.mark.real_data
@pytest.mark.parametrize("change", CHANGES)
def test_only_reworded_copies_of_real_questions_are_found(
    change: str, real: tuple[list[str], Index]
) -> None:
    questions, index = real
    found = [[row for row, _ in index.search(CHANGES[change](text))] for text in questions]
    assert sum(rows == [n] for n, rows in enumerate(found)) >= 0.98 * len(questions)
    assert all(rows in ([n], []) for n, rows in enumerate(found))


def test_options_without_an_end_are_text() -> None:
    """A search that tries all pairs of `a)` and `b)` would take hours."""
    text = "a) b) " * 3000
    assert surroundings.parts(text)[1] == ""
    assert surroundings.parts("which is even? (a) 1 (b) 2 (c) 3") == (
        "which is even?",
        "(a) 1 (b) 2 (c) 3",
    )
