r"""Detect answers that equal the gold but are not worked out: copies of a formula of the prompt,
computations, and answers without the form that the question names (`as a decimal`).

`513^2 - 487^2` equals the gold of "Compute $513^2 - 487^2$" without solving anything.

An answer is a copy if it is an unevaluated expression (`\frac{6}{4}`, `\gcd(12,18)`, `(x+1)^2`), is
written like a formula of the prompt, and is not written like the gold. Brackets, multiplication
signs, the order of terms and factors, added zeros and ones (`-0`, `/1`, `^1`) and added signs do
not matter. Numbers, reduced fractions, names and lists of these are never copies. Not detected:
copies of only a part of a formula, and copies rewritten in any other way.

Integrals, sums, products, limits, derivatives, maxima, common divisors and multiples, and
determinants are computations, unless the gold has one of these. Roots, powers, factorials and
values of functions are not."""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence, Set
from functools import lru_cache

from tasks.grading.answers import units
from tasks.grading.answers.forms import parts_of, sides_of
from tasks.grading.answers.numbers import DROPPED, NUMBER
from tasks.grading.answers.spelling import clean
from tasks.grading.answers.units import DEGREES, TEXT

MAX_PROMPT = 20_000  # characters at the end of a prompt
MAX_QUESTION = 500  # the same, for the form that it names, because examples may precede it
MAX_ANSWER = 1000  # characters

NAMES = "sqrt|cbrt|binom|gcd|lcm|log|ln|exp|sin|cos|tan|cot|sec|csc|floor|ceil|abs|mod|min|max|det"
OPERATION = re.compile(
    rf"[-+*/^!|÷×·√∛∜⌊⌈]|[\d)]\s*\(|(?<![a-zA-Z])(?:{NAMES})(?![a-zA-Z])"
    r"|\\(?:frac|[dt]?binom|choose|arc(?:sin|cos|tan)|(?:sin|cos|tan)h|sum|prod|i*int|lim|[lr]?vert|[lr]floor"
    r"|[lr]ceil|cdot|times|div|[bp]?mod|begin)(?![a-zA-Z])"
)
FORMULA = re.compile(  # bounded by MAX_ANSWER, so that unclosed delimiters take little time
    r"\$\$(.{1,1000}?)\$\$|(?<!\\)\$(.{1,1000}?)(?<!\\)\$|\\\((.{1,1000}?)\\\)|\\\[(.{1,1000}?)\\\]"
    r"|\\begin\{(?:align|equation|gather)\*?\}(.{1,1000}?)\\end",
    re.DOTALL,
)
SHORT = "of|is|in|to|if|at|by|on|or|an|be|he|it|we|no|so|do|as|us"
WORD = re.compile(  # a token that ends a formula in running text
    rf"(?<![\\a-zA-Z])(?:(?!(?:{NAMES})(?![a-z]))[^\W\d_]{{3,}}|(?i:{SHORT}|a(?=\s+\w))(?![a-zA-Z]))"
    r"|[.,;:?](?=\s|$)|\n"
)
LEAD = re.compile(r"^(?:[^\W\d_]{2,}\s+)+")  # the words of a copied question
BETWEEN = re.compile(
    r"(?<![<>!])=|[<>≤≥]|\\(?:le|leq|ge|geq|lt|gt|ne|neq|approx|equiv|in|to)(?![a-zA-Z])"
    r"|\\\\|\\q?quad(?![a-zA-Z])|&"
)
DIVIDED = re.compile(r"\\[dtc]?frac(?![a-zA-Z])|\\div(?![a-zA-Z])|÷")
BINOMIAL = re.compile(r"\\[dt]binom(?![a-zA-Z])|\\choose(?![a-zA-Z])")
UNWRITTEN = re.compile(r"\\(?:cdot|times|left|right)(?![a-zA-Z])|[(){}\[\]*·×+$&\\]")
TOKEN = re.compile(r"\d+(?:\.\d+)?|\S")
ZEROS = re.compile(r"(?<=\d)\.0+(?!\d)")
ADDED = {"-", "/", "^"}  # signs without effect next to 0, 1, or the same sign

ASKS = re.compile(
    r"\\(?:i*int|oint|sum|prod|coprod|lim(?:sup|inf)?|gcd|lcm|det|max|min|sup)(?![a-zA-Z])|[∫∑∏]"
    r"|(?<![a-zA-Z])(?:gcd|lcm|det|max|min|lim|sum|prod|int(?:egral|egrate)?)\}?\s*[({_]"
    r"|\\begin\{vmatrix\}|\|\s*\\begin\{|\\frac\s*\{\s*(?:d|\\partial)[^{}]*\}\s*\{\s*(?:d|\\partial)"
)
FRACTION = re.compile(r"\\frac\s*\{\s*(\d+)\s*\}\s*\{\s*(\d+)\s*\}|(\d+)\s*/\s*(\d+)")
ROOT = re.compile(r"\\sqrt\s*\{\s*(\d{1,9})\s*\}")

Symbols = tuple[str, ...]


def copied(given: str, golds: Iterable[str], prompt: str) -> str | None:
    """Return the values of an answer, joined by commas, with each copy replaced by the formula of
    the prompt that it copies; None if there is no copy, or for an answer longer than MAX_ANSWER."""
    if len(given) > MAX_ANSWER or not calculates(clean(given)):
        return None
    in_prompt = [(Counter(written), formula) for written, formula in formulas(prompt).items()]
    expected = (value for gold in golds for value in parts_of(clean(gold)))
    gold_symbols = {symbols(form) for value in expected for form in forms(value)}
    values = parts_of(LEAD.sub("", clean(given)))
    written = [copied_value(value, gold_symbols, in_prompt) for value in values]
    if not any(written):
        return None
    return ", ".join(new or old for new, old in zip(written, values, strict=True))


def copied_value(
    value: str, gold_symbols: Set[Symbols], in_prompt: Iterable[tuple[Counter[str], str]]
) -> str | None:
    """Return the formula in `in_prompt` that `value` copies, if any; None if `value` is one of
    the golds."""
    found = [symbols(form) for form in forms(value)]
    if not gold_symbols.isdisjoint(found):
        return None
    given = [Counter(key(one)) for one in found]
    copies = (
        formula
        for written, formula in in_prompt
        if any(one >= written and ADDED.issuperset(one - written) for one in given)
    )
    return next(copies, None)


@lru_cache(maxsize=256)
def formulas(prompt: str) -> dict[Symbols, str]:
    """Return the unevaluated formulas in the last MAX_PROMPT characters of a prompt, by the `key`
    of their symbols. Sides of equations and items of lists are formulas too."""
    prompt = prompt[-MAX_PROMPT:]
    found = [
        "".join(filter(None, match.groups())).rstrip("?. ") for match in FORMULA.finditer(prompt)
    ]
    found += WORD.split(FORMULA.sub("\n", prompt))
    sides = (side for text in found for side in (text, *BETWEEN.split(TEXT.sub("&", text))))
    pieces = (form for side in sides for part in parts_of(clean(side)) for form in forms(part))
    return {key(symbols(piece)): piece for piece in pieces if calculates(piece)}


def forms(value: str) -> Iterator[str]:
    """Yield a value without its unit. If it is an equation, also yield its right side, unless one
    of the sides before it is neither a name nor a formula."""
    value = units.split(value)[0]
    yield value
    *left, right = sides_of(value)
    if left and all(re.search(r"[a-zA-Z]", side) or calculates(side) for side in left):
        yield right.strip()


def calculates(value: str) -> bool:
    """Return whether an answer is unevaluated (`6/4`, `10^2`, `x+1`), unlike `3/2`, `x`, `1, x`."""
    number = NUMBER.fullmatch(value.strip())
    if number is None:
        bare = DEGREES.sub("", without_text(value)).strip()
        return OPERATION.search(re.sub(r"^[-+]|(?<=[=,;(\[])\s*[-+]", " ", bare)) is not None
    top, bottom = (number[name] or number[f"{name}2"] for name in ("top", "bottom"))
    if top and bottom:
        top, bottom = (int(DROPPED.sub("", side)) for side in (top, bottom))
        return bottom == 1 or math.gcd(top, bottom) > 1
    return (number["power"] or number["power_bare"] or number["repeated"]) is not None


@lru_cache(maxsize=4096)
def symbols(value: str) -> Symbols:
    """Return the sorted symbols of a formula. Formulas are compared by these."""
    text = BINOMIAL.sub("binom ", DIVIDED.sub("/", ZEROS.sub("", without_text(value))))
    return tuple(sorted(TOKEN.findall(UNWRITTEN.sub(" ", text.replace("**", "^")))))


def without_text(value: str) -> str:
    r"""Return a formula without any `\text{...}`, but keep the content if it is a function name."""
    return TEXT.sub(lambda found: found[1] if re.fullmatch(NAMES, found[1]) else "", value)


def key(written: Symbols) -> Symbols:
    """Return symbols without 0 and 1, which a copy may insert without changing the value."""
    return tuple(symbol for symbol in written if symbol not in ("0", "1"))


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
