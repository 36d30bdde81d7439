r"""`math_verify`: the completion's answer equals the gold, as judged by the library math-verify
(Apache-2.0). Several trainers use its rules unchanged.

The rules are kept as published: a trailing unit is dropped even if it is a letter of an expression,
and decimals are compared to six places. `math` is stricter in both respects.

Answers are found in boxes, in LaTeX and in plain text; of several boxes, the last one counts. 1/2,
0.5 and \frac{2}{4} are equal, as are sets in any order and equations up to a factor. The library's
time limits are off, because the process has its own."""

import re
from functools import lru_cache
from typing import Any

from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse
from math_verify import verify as equal

from tasks.grading.answers import symbolic  # noqa: F401  (it completes the library's parser)
from tasks.grading.answers.marked import last_boxes
from tasks.grading.verdict import Verdict

LIBRARIES = ("math-verify", "latex2sympy2-extended", "sympy")
ANSWERS = True
FORMS = ()
REFUSES_COPIES = True

TARGETS = (LatexExtractionConfig(), ExprExtractionConfig())

DELIMITED = re.compile(r"(?<!\\)\$|\\\(|\\\[|\\boxed")
NAMED = r"\\(?:begin|end|text|mathrm|mbox|operatorname)\{[^{}\n]*\}"
FORMULA = re.compile(
    rf"[^a-zA-Z\\]*+(?:(?:{NAMED}|\\[a-zA-Z]++|\\[^a-zA-Z]|[a-zA-Z](?![a-zA-Z]))[^a-zA-Z\\]*+)++"
)
INNER = re.compile(r"\\[()\[\]]|(?<!\\)\$")
MAX_FORMULA = 300  # characters
TEXT = re.compile(r"\\(?:text|mathrm|mbox|textbf)\{([^{}]*)\}")
WORDS = re.compile(r"[^\W\d_]+(?:\s+[^\W\d_]+)*[.!]?")


def verify(completion: str, answer: str) -> Verdict:
    """Return `correct`, `wrong`, or `unparsed` if no mathematics is found. An unreadable gold is an
    `error`."""
    gold = read_gold(answer)
    if all(isinstance(part, str) for part in gold):
        return Verdict("error", f"math-verify cannot read the gold answer {answer[:80]!r}")
    if TEXT.sub(r"\1", answer).strip() == completion.strip():
        return Verdict("correct", completion.strip())  # words, not mathematics
    verdict = Verdict("unparsed", "")
    for text in readings(completion):
        given = read(text)
        if given and equal(gold, given, timeout_seconds=None):
            return Verdict("correct", str(given[-1]))
        if not all(isinstance(part, str) for part in given):
            verdict = Verdict("wrong", str(given[-1]))
    return verdict


def canonical_completion(answer: str) -> str:
    """Return a completion with exactly this gold as its answer."""
    return delimited(answer)


def readings(completion: str) -> list[str]:
    """Return the texts to parse. The last one is the end of the completion (see `last_boxes`). If
    that is a formula without outer delimiters, as is usual between tags, its boxed form comes
    first, because the library would parse only a part of the bare formula."""
    text = last_boxes(completion)
    formula = INNER.sub("", text.strip()).replace("π", r"\pi ")
    if (
        len(formula) > MAX_FORMULA
        or "\n" in formula
        or not FORMULA.fullmatch(formula)
        or "\\boxed" in formula
    ):
        return [text]
    return [delimited(formula), text]


def read(text: str) -> list[Any]:
    """Return the library's parse of a text: the expression and, last, the text from which it was
    parsed."""
    found: list[Any] = parse(text, TARGETS, parsing_timeout=None)
    return found


@lru_cache(maxsize=64)
def read_gold(answer: str) -> list[Any]:
    """Return the gold as parsed by the library. A gold without delimiters is parsed as LaTeX,
    because in plain text `2x + 3` is read as 2."""
    if WORDS.fullmatch(answer.strip()) and " " in answer.strip():
        return []  # a sentence: as LaTeX it would be a product of letters
    return read(delimited(answer)) or read(answer)


def delimited(answer: str) -> str:
    """Return an answer in a box, without final punctuation or LaTeX's thousands separators
    (20,\\!000); unchanged if it has delimiters."""
    if DELIMITED.search(answer):
        return answer
    bare = re.sub(r"(?<=\d),\\!\s*(?=\d{3})", "", answer).strip().rstrip("\\.,; ")
    return rf"\boxed{{{bare}}}"
