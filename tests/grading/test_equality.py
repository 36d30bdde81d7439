"""Equality of answers: properties of numbers, lists and letters, tolerances, and golds of a
published set. `test_verifiers` tests the hand-made cases of `cases.csv`."""

import itertools
import json
import time
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis import settings
from hypothesis import strategies as st

from tasks.grading.verifiers import choice, math, numeric

FRAC, DFRAC = r"\frac", r"\dfrac"


def spellings(value: Decimal) -> list[str]:
    """Return the spellings of a number by people and models."""
    ratio = Fraction(value)
    sign = "-" if ratio < 0 else ""
    grouped = f"{value:,f}"
    return [
        f"{value:f}",
        grouped,
        grouped.replace(",", "{,}"),
        grouped.replace("-", "\N{MINUS SIGN}"),
        f"{value.scaleb(3):f}e-3",
        rf"{value.scaleb(-4):f} \times 10^{{4}}",
        rf"{sign}\frac{{{abs(ratio.numerator)}}}{{{ratio.denominator}}}",
        f"{ratio.numerator}/{ratio.denominator}",
        rf"{value.scaleb(2):f}\%",
    ]


@settings(max_examples=40, deadline=None)
@hypothesis.given(st.decimals(-(10**9), 10**9, places=2))
def test_number_equals_all_its_spellings_and_no_other_number(value: Decimal) -> None:
    for text in spellings(value):
        for verify, given_text in ((numeric.verify, f"#### {text}"), (math.verify, boxed(text))):
            assert verify(given_text, f"{value:f}").outcome == "correct", text
            assert verify(given_text, f"{value + 1:f}").outcome == "wrong", text


def boxed(text: str) -> str:
    return rf"\boxed{{{text}}}"


@settings(max_examples=20, deadline=None)
@hypothesis.given(st.lists(st.integers(-50, 50), min_size=2, max_size=4, unique=True), st.randoms())
def test_order_of_values_is_ignored_and_single_values_are_wrong(
    values: list[int], random: Any
) -> None:
    gold = json.dumps({"all": [str(value) for value in values]})
    mixed = random.sample(values, len(values))
    for verify in (math.verify, numeric.verify):
        for joined in (", ".join(map(str, mixed)), r" \text{ and } ".join(map(str, mixed))):
            assert verify(boxed(joined), gold).outcome == "correct"
        for other in ([*mixed, 99], mixed[1:], [*mixed[1:], 99]):
            assert verify(boxed(", ".join(map(str, other))), gold).outcome == "wrong"


LETTERS = st.sets(st.sampled_from("ABCDE"), min_size=1).map(sorted)
GIVEN = (r"\boxed{{{}}}", "<answer>{}</answer>", "The answer is {}.", "答案是{}", "{}")


@hypothesis.given(LETTERS, LETTERS, st.sampled_from(GIVEN), st.sampled_from(("", ", ")))
def test_letters_are_correct_only_if_they_equal_the_gold(
    gold: list[str], letters: list[str], template: str, comma: str
) -> None:
    completion = template.format(comma.join(letters))
    outcome = "correct" if letters == gold else "wrong"
    assert choice.verify(completion, "".join(gold)).outcome == outcome


def test_tolerance_is_relative_to_the_gold() -> None:
    given = r"\boxed{6.63\times10^{-34}}"
    assert math.verify(given, "6.626e-34", relative_tolerance=0.01).outcome == "correct"
    assert math.verify(given, "6.626e-34", relative_tolerance=1e-5).outcome == "wrong"
    assert numeric.verify("6.63e-34", "6.626e-34", relative_tolerance=0.01).outcome == "correct"
    assert numeric.verify("6.63e-34", "6.626e-34").outcome == "wrong"


@pytest.mark.parametrize("text", ["$", "(", "{", ",", "or ", r"\text{", r"\[", "1,", r"\frac{"])
def test_hostile_text_is_compared_in_little_time(text: str) -> None:
    """The limit is a second, or more on a busy machine. A fault would take minutes."""
    start = time.process_time()
    for completion in (text * 5000, rf"\boxed{{{text * 5000}}}"):
        assert math.verify(completion, "5").outcome != "correct"
    assert time.process_time() - start < 40


@pytest.mark.real_data
def test_golds_of_a_published_set_are_correct_in_any_typesetting(real_data: Path) -> None:
    """A fifteenth of MATH's golds is tested, in six spellings. The next row's gold is wrong."""
    rows = json.loads((real_data / "math_train" / "math.json").read_text())
    golds = list(dict.fromkeys(str(row["answer"]) for row in rows if row["answer"]))[::15]
    wrong = [
        (gold, given)
        for gold in golds
        for given in (
            rf"so \boxed{{{gold}}}.",
            rf"\boxed{{{gold}.}}",
            rf"\boxed{{${gold}$}}",
            f"<answer>{gold}</answer>",
            rf"\boxed{{{gold.replace(FRAC, DFRAC)}}}",
            rf"\boxed{{\boxed{{{gold}}}}}",
        )
        if math.verify(given, gold).outcome != "correct"
    ]
    assert (len(golds), wrong) == (193, [])
    mistaken = [
        (gold, other)
        for gold, other in itertools.pairwise(golds)
        if math.verify(rf"\boxed{{{other}}}", gold).outcome == "correct"
    ]
    assert mistaken == []
