r"""`hendrycks`: the MATH benchmark's rule (arXiv 2103.03874) as implemented in PRM800K's grader,
which most trainers use.

The answer must be in a box. It is correct if it equals the gold after both are normalised (spacing,
\left, \dfrac, units, degrees, 0.5 for 1/2), or if math-verify judges them equal. But a fraction
must be reduced like the gold, only an integer equals an integer gold, and tuples must agree element
by element. `math` is less strict: it accepts 2/4 for 1/2. The published rule is kept with its
faults: a trailing letter that could be a unit is dropped, so `2s` is read as `2`."""

import re

from tasks.grading.answers.marked import gold_boxed, last_boxed
from tasks.grading.verdict import Verdict
from tasks.grading.verifiers import math_verify

LIBRARIES = math_verify.LIBRARIES
ANSWERS = True
FORMS = ()
REFUSES_COPIES = True

REPLACED = [
    (re.compile(pattern), by)
    for pattern, by in (
        (r"(?<!\\)\\[,!;: ]|~|\n|\\quad|\\(?:left|right)(?![a-z])", ""),
        (r"\\[dtc]frac", r"\\frac"),
        (r"\^\{?\\circ\}?|\\\$|\$|\\?%", ""),
        (r"\\(?:text|mbox|mathrm|textbf)\{\s*([^{}]*?)\s*\}$", r"~\1"),
        (r"\\sqrt\s*(\w)", r"\\sqrt{\1}"),
        (r"\\frac\s*(\d)\s*(\d)(?!\d)", r"\\frac{\1}{\2}"),
        (r"(?<=\d)(?:,|\{,\})(?=\d{3}(?!\d))", ""),
        (r"(?<![\d.])\.(?=\d)", "0."),
        (r"^(-?\d+)/(-?\d+)$", r"\\frac{\1}{\2}"),
        (r"^[a-zA-Z]\s*=(?!=)", ""),
    )
]
FRACTION = re.compile(r"-?\\frac\{-?\d+\}\{-?\d+\}")
INTEGER = re.compile(r"-?\d+")


def verify(completion: str, answer: str) -> Verdict:
    """Return `correct` or `wrong`; `unparsed` without a closed box. An empty gold is an `error`."""
    boxed = gold_boxed(answer)
    gold = normalize(answer if boxed is None else boxed)
    given = last_boxed(completion)
    if not gold:
        return Verdict("error", "the gold answer is empty")
    if given is None:
        return Verdict("unparsed", "")
    return Verdict("correct" if same(normalize(given), gold) else "wrong", given)


def canonical_completion(answer: str) -> str:
    """Return the gold in a box."""
    boxed = gold_boxed(answer)
    return rf"\boxed{{{answer if boxed is None else boxed}}}"


def normalize(text: str) -> str:
    """Return an answer in a normal form, which many spellings share."""
    text = text.strip()
    for pattern, by in REPLACED:
        text = pattern.sub(by, text)
    value, _, unit = text.partition("~")
    text = (value or unit).replace(" ", "").rstrip(".\\")
    return r"\frac{1}{2}" if text == "0.5" else text


def same(given: str, gold: str) -> bool:
    """Return whether two normalised answers are the same."""
    if given == gold:
        return True
    if not given or (FRACTION.fullmatch(given) and FRACTION.fullmatch(gold)):
        return False
    given_parts = split(given)
    gold_parts = split(gold)
    if len(given_parts) > 1 or len(gold_parts) > 1:
        same_brackets = (given[0], given[-1]) == (gold[0], gold[-1])
        same_length = len(given_parts) == len(gold_parts)
        return same_brackets and same_length and all(map(same, given_parts, gold_parts))
    if INTEGER.fullmatch(gold):
        return re.fullmatch(rf"0*{gold}(?:\.0*)?", given) is not None
    return math_verify.verify(rf"\boxed{{{given}}}", rf"\boxed{{{gold}}}").outcome == "correct"


def split(text: str) -> list[str]:
    """Return the elements of a tuple or an interval; any other text is a single element."""
    if (
        len(text) > 2
        and text[0] in "(["
        and text[-1] in ")]"
        and not re.search(r"[(\[]|[)\]]", text[1:-1])
    ):
        return text[1:-1].split(",")
    return [text]
