r"""Check the form of an answer that equals the gold: whether it is computed, and whether it has the
form that the question names (`as a decimal`), if the gold has it.

`\int_0^2 x\,dx` for 2 is not computed. Integrals, sums, products, limits, derivatives, maxima,
common divisors and multiples, and determinants are no answers, unless the gold has one of these.
Roots, powers, factorials and values of functions are not checked."""

import math
import re
from collections.abc import Callable, Sequence

from tasks.grading.answers.forms import sides_of
from tasks.grading.answers.numbers import NUMBER
from tasks.grading.answers.spelling import clean

ASKS = re.compile(
    r"\\(?:i*int|oint|sum|prod|coprod|lim(?:sup|inf)?|gcd|lcm|det|max|min|sup)(?![a-zA-Z])|[∫∑∏]"
    r"|(?<![a-zA-Z])(?:gcd|lcm|det|max|min|lim|sum|prod|int(?:egral|egrate)?)\}?\s*[({_]"
    r"|\\begin\{vmatrix\}|\|\s*\\begin\{|\\frac\s*\{\s*(?:d|\\partial)[^{}]*\}\s*\{\s*(?:d|\\partial)"
)
FRACTION = re.compile(r"\\frac\s*\{\s*(\d+)\s*\}\s*\{\s*(\d+)\s*\}|(\d+)\s*/\s*(\d+)")
ROOT = re.compile(r"\\sqrt\s*\{\s*(\d{1,9})\s*\}")
MAX_QUESTION = 500  # characters at the end of a prompt, because examples may precede it


def is_computed(given: str, golds: Sequence[str]) -> bool:
    """Return whether the last side of an answer, or a number on another side, does not ask for a
    computation, or whether a gold asks for one too."""
    if not ASKS.search(given) or any(map(ASKS.search, golds)):
        return True
    *others, last = sides_of(clean(given))
    return not ASKS.search(last) or any(NUMBER.fullmatch(side.strip()) for side in others)


def is_reduced(text: str) -> bool:
    """Return whether all fractions of whole numbers are reduced, and all roots free of squares."""
    pairs = ([int(n) for n in found.groups() if n] for found in FRACTION.finditer(text))
    roots = (int(found[1]) for found in ROOT.finditer(text))
    return all(math.gcd(*pair) == 1 and pair[1] > 1 for pair in pairs) and all(
        root % (n * n) for root in roots for n in range(2, min(math.isqrt(root), 1000) + 1)
    )


def matches(pattern: str) -> Callable[[str], object]:
    return re.compile(pattern).search


QUOTIENT, MIXED = r"\\frac|\d\s*/\s*\d", r"\d\s*\\frac|\d\s+\d+\s*/"
COMMON = r"(?:common|simplified|reduced) fraction"
FORMS = tuple(
    (re.compile(rf"(?i)\b(?:{words})\b"), form)
    for words, form in (
        (r"(?:as|in|to) (?:an? )?(?:\w+ )?decimals?", matches(rf"^(?!.*(?:{QUOTIENT}|%|\\sqrt))")),
        (rf"(?:as|in|to) (?:an? )?(?:\w+ )?fractions?|{COMMON}", matches(r"^(?!.*(?:\.\d|%))")),
        (rf"(?:simplest|lowest|reduced|simplified)(?: \w+)? (?:form|terms)|{COMMON}", is_reduced),
        (r"mixed (?:number|fraction|numeral)", matches(MIXED)),
        (r"improper fraction", matches(rf"^(?!.*(?:{MIXED}))")),
        (
            r"(?:as|in) (?:an? )?percent(?:age)?s?",
            matches(rf"^(?!.*(?:{QUOTIENT}))(?:.*%|(?!-?0?\.))"),
        ),
        (r"scientific notation", matches(r"10\s*\^|\d[eE][-+]?\d")),
    )
)


def has_form(given: str, golds: Sequence[str], question: str) -> bool:
    """Return whether an answer has each form that the question names and all golds have."""
    named = [form for words, form in FORMS if words.search(question[-MAX_QUESTION:])]
    value, wanted = clean(given), [clean(gold) for gold in golds] if named else []
    return all(form(value) or not all(map(form, wanted)) for form in named)
