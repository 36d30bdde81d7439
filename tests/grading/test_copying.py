"""Answers that copy a formula of the prompt, and answers that also occur in it."""

import pytest

from tasks.grading.loading import load
from tests.grading.test_verifiers import PART

MATH = ("math", "math_verify")
DIFFERENCE, FRACTION = "Compute $513^2 - 487^2$.", r"Simplify $\frac{6}{4}$."


@pytest.mark.parametrize(
    ("prompt", "gold", "given", "verifiers"),
    [
        (DIFFERENCE, "26000", "513^2 - 487^2", MATH),
        (DIFFERENCE, "26000", r"\left(513^{2}\right)-487^{2}", MATH),
        (DIFFERENCE, "26000", "x = 513^2-487^2", MATH),
        (DIFFERENCE, "26000", "-487^2 + 513^2 + 0", MATH),
        (DIFFERENCE, "26000", "513^2 - 487^2 - 0", MATH),
        (DIFFERENCE, "26000", r"\frac{513^2 - 487^2}{1}", MATH),
        (DIFFERENCE, "26000", "(513^2 - 487^2)^1", MATH),
        (DIFFERENCE, "26000", "513.0^2 - 487^2", ("math",)),
        (DIFFERENCE, "26000", "513^2 - 487^2 = 513^2 - 487^2", ("math",)),
        ("Compute 513^2 - 487^2.", "26000", "513^2 - 487^2", MATH),
        (r"What is \(\dbinom{31}{28}\)?", "4495", r"\dbinom{31}{28}", MATH),
        (r"What is \[\binom{31}{28}?\]", "4495", r"\dbinom{31}{28}", MATH),
        (r"Find $\gcd(12,18)$.", "6", r"\gcd(12, 18)", ("math_verify",)),
        (r"Find $\log_2 8$.", "3", r"x = \log_2 8", ("math",)),
        (r"Find $4!$.", "24", r"4! ", MATH),
        (FRACTION, r"\frac{3}{2}", r"\frac{6}{4}", (*MATH, "numeric")),
        (r"Expand $(x+1)^2$.", "x^2+2x+1", "(x+1)^2", (*MATH, "hendrycks")),
        (r"Write $0.\overline{3}$ as a fraction.", r"\frac13", r"0.\overline{3}", ("math",)),
        (r"Write $2x + 3y = 6$ as $y = mx + b$.", r"y = -\frac{2}{3}x + 2", "2x+3y=6", MATH),
    ],
)
def test_copied_formula_is_wrong(
    prompt: str, gold: str, given: str, verifiers: tuple[str, ...]
) -> None:
    for name in verifiers:
        loaded = load(name, {})
        assert loaded.verify(rf"\boxed{{{given}}}", gold).outcome == "correct"  # without a prompt
        assert loaded.verify(rf"\boxed{{{given}}}", gold, prompt).outcome == "wrong"
        assert loaded.verify(rf"\boxed{{{gold}}}", gold, prompt).outcome == "correct"


def test_every_value_of_a_list_is_checked() -> None:
    verify, prompt = load("math", {}).verify, r"Find $a = 3 \cdot 4$ and $b = 7 - 5$."
    for given, outcome in (
        (r"4 \cdot 3, 7 - 5", "wrong"),
        ("12, 7-5", "wrong"),
        ("2, 12", "correct"),
    ):
        assert verify(rf"\boxed{{{given}}}", "12, 2").outcome == "correct"
        assert verify(rf"\boxed{{{given}}}", "12, 2", prompt).outcome == outcome


@pytest.mark.parametrize(
    ("prompt", "gold", "given"),
    [
        ("Which is smaller, $2^3$ or $3^2$?", "2^3", "2^{3}"),
        (DIFFERENCE, "26000", "513^2 - 487^2 = 26000"),
        (DIFFERENCE, "26000", "26000 = 513^2 - 487^2"),
        (r"Find $\sum_{n=1}^{9} n$.", "45", r"\sum_{n=1}^{9} n = 45"),
        ("Find the negative of $x - 1$.", "1 - x", "-(x - 1)"),
        (DIFFERENCE, "26000", "26{,}000"),
        ("Solve $x^2 = 4$ for $x > 0$: is $x = 2$ or $x = -2$?", "2", "x = 2"),
        ("He eats 3/4 of a cake and 1/2 of a pie.", "0.75", "3/4"),
        ("It has 2 1/2 cups and $1.6 \\times 10^{-19}$ C.", "5/2", "2 1/2"),
        ("It has 2 1/2 cups and $1.6 \\times 10^{-19}$ C.", "1.6e-19", r"1.6 \times 10^{-19}"),
        ("A side has the length $3\\sqrt2$ cm.", r"3\sqrt{2}\text{ cm}", r"3\sqrt{2}"),
        ("Which line is it: $y = 2x + 3$ or $y = x$?", "2x+3", "y = 2x+3"),
        ("Which integers of 3, 1, 2 are odd, or $(-2, 3)$?", "(-2, 3)", "(-2,3)"),
        ("Which of the integers $1, 2$ are small?", "2, 1", "1, 2"),
        ("An angle of $45^\\circ$ and one of $60^\\circ$.", "45", r"45^\circ"),
        ("Let $f(x) = 2(x+1)$.", "1 + x", "x + 1"),
    ],
)
def test_answer_that_only_occurs_in_the_prompt_is_correct(
    prompt: str, gold: str, given: str
) -> None:
    assert load("math", {}).verify(rf"\boxed{{{given}}}", gold, prompt).outcome == "correct"


def test_prompt_reaches_parts_and_composites() -> None:
    configured = {
        "answer": {**PART, "pattern": "<answer>(.*)</answer>"},
        "both": {"method": "composite", "weights": {"answer": 0.5, "exact": 0.5}},
    }
    text = "<answer>513^2 - 487^2</answer>"
    verify = load("both", configured).verify
    assert verify(text, "26000").outcome == "correct"
    assert verify(text, "26000", DIFFERENCE).outcome == "wrong"
