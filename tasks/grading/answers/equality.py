r"""Decide whether two answers, as people and models write them, are the same.

The checks run in this order, cheapest first:

1. The same text, apart from typesetting.
2. Names of a result: no solution and \emptyset, all real numbers and \mathbb{R}.
3. An equation against a value: `x = 4` is `4`, but `xy = 4` is not.
4. Times of day, `4:40 p.m.`.
5. Words and codes, letter by letter: `seat` is not `east`, `ABCD` not `ADCB`.
6. Numbers in a base, `33_4`: digits and base.
7. Numbers with or without a unit, exactly or within a tolerance.
8. Chains of inequalities and set-builders, as intervals.
9. Lists, in any order. `5 or 6` is not an answer if the gold is one value.
10. Everything else as mathematics, by `symbolic`."""

import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from tasks.grading.answers import numbers, symbolic, units
from tasks.grading.answers.forms import (
    AND,
    BASED,
    BUILDER,
    LETTERS,
    OR,
    RULED,
    Interval,
    based,
    chain_of,
    interval_of,
    is_word,
    parts_of,
    plain_base,
    point_of,
    rule_of,
    sides_of,
    signed,
    union_of,
)
from tasks.grading.answers.golds import pairs_up
from tasks.grading.answers.numbers import Tolerance
from tasks.grading.answers.running_text import of_gold
from tasks.grading.answers.spelling import NAMED, clean, key, meaning
from tasks.grading.answers.units import TEXT

MAX_ANSWER = 2000  # characters; a longer answer is compared only as text

SEPARATED = re.compile(rf",|;|{OR.pattern}|{AND.pattern}|\\begin")
# allowed before the equals sign of an answer: x, x_1, f(x), AB, \angle ABC, P(A), |v|
ONE_NAME = re.compile(
    r"(?:m?\s*\\(?:angle|triangle)\s*|\\(?:overline|vec|hat|bar|text|mathrm|mathbf|mathbb|operatorname)\s*)?"
    r"\{?\s*(?:\\?[a-zA-Z]|[A-Z]{2,4}|\\[a-zA-Z]+|(?<=\{)[\w ]+)\s*\}?"
    r"(?:_(?:\{(?:[^{}]|\{[^{}]*\})*\}|\w))?(?:\^\{?\\?'*[a-z-]*\}?)?'*\s*(?:\([^()]*\)|\[[^\[\]]*\]|!)?"
)
# a ratio of segments and the size of a vector, a segment or a number: \frac{AB}{CD}, |AB|, |z|
QUANTITY = re.compile(
    r"\\frac\s*\{\s*[A-Z]{1,4}\s*\}\s*\{\s*[A-Z]{1,4}\s*\}|[A-Z]{2,4}\s*/\s*[A-Z]{2,4}"
    r"|(?:\||\\\||\\[lr]?[vV]ert)\s*(?:[A-Z]{1,4}|[a-wz](?:_\w)?"
    r"|\\(?:vec|overrightarrow|overline)\s*\{?\s*[a-zA-Z]{1,2}\s*\}?)\s*(?:\||\\\||\\[lr]?[vV]ert)"
)
TIME = re.compile(
    r"(?P<hour>\d{1,2})(?:\s*:\s*(?P<minute>\d\d))?\s*(?:(?P<half>[apAP])\.?\s?[mM]\.?)?"
)
ARITHMETIC = re.compile(r"[-+*/^(){}\d\s.]+")


def same(gold: str, given: str, tolerance: Tolerance, dialect: str = "latex") -> bool | None:
    """Return whether `given` equals a gold written in `dialect`; None if `given` is unreadable."""
    if dialect == "sympy":
        return same_as_python(gold, given, tolerance)
    gold, given = of_gold(gold), clean(given)
    if not given:
        return None
    if key(gold) == key(given):
        return True
    if len(given) > MAX_ANSWER or len(gold) > MAX_ANSWER:
        return numbers_equal(gold, given, tolerance) or False
    for rule in RULES:
        verdict = rule(gold, given, tolerance)
        if verdict is not None:
            return verdict
    return by_symbols(gold, given, tolerance)


def same_as_python(gold: str, given: str, tolerance: Tolerance) -> bool | None:
    """Apply `same` to a gold in Python notation. The answer is compared with the gold's LaTeX form
    by all rules, and also with the gold itself if the answer is in Python notation."""
    if key(gold) == key(clean(given)):
        return True
    expression, answer = symbolic.from_python(gold), symbolic.from_python(clean(given))
    if answer is not None and symbolic.equal(expression, answer, tolerance):
        return True
    found = [same(latex, given, tolerance) for latex in symbolic.in_latex(expression)]
    return True if True in found else None if None in found else False


@lru_cache(maxsize=4096)
def readable(gold: str, dialect: str = "latex") -> bool:
    """Return whether a gold can be compared; a sentence or unparsable LaTeX cannot be."""
    if dialect == "sympy":
        return symbolic.from_python(gold) is not None
    text = of_gold(gold)
    if not text:
        return False
    if key(text) in NAMED or is_word(gold) or BASED.fullmatch(text) or units.number_of(text):
        return True
    if TIME.fullmatch(TEXT.sub(r"\1", text)) or re.fullmatch(r"\\[a-zA-Z]+", text):
        return True
    named, value = sides_of(text)[:-1], sides_of(text)[-1]
    if named and all(map(is_named, named)):
        return readable(value)  # so the library need not be able to read the name
    bare = TEXT.sub(r"\1", text)
    if bare == text and " " in text and re.fullmatch(r"[^\W\d_]+(?: [^\W\d_]+)+[.!]?", text):
        return False  # a sentence: as LaTeX it would be a product of letters
    return (
        interval_of(text) is not None
        or union_of(text) is not None
        or RULED.fullmatch(text) is not None
        or chain_of(text) is not None
        or all(symbolic.from_latex(units.split(part)[0]) is not None for part in parts_of(text))
        or symbolic.from_latex(text) is not None
    )


def by_name(gold: str, given: str, tolerance: Tolerance) -> bool | None:
    r"""Compare named results, such as "no solution" and \emptyset; None if neither is a name."""
    first, second = meaning(gold), meaning(given)
    return None if first is None and second is None else first == second


def by_time(gold: str, given: str, tolerance: Tolerance) -> bool | None:
    """Compare times of day; one may lack a.m. or p.m. (`4:40`). Return None for other answers."""
    first, second = TIME.fullmatch(TEXT.sub(r"\1", gold)), TIME.fullmatch(TEXT.sub(r"\1", given))
    if first is None or second is None or not (first["half"] or second["half"]):
        return None
    if not (first["half"] and second["half"]) and not (first["minute"] and second["minute"]):
        return None  # 3am and 3
    halves = {found["half"].lower() for found in (first, second) if found["half"]}
    clocks = {(int(found["hour"]), int(found["minute"] or 0)) for found in (first, second)}
    return len(clocks) == 1 and len(halves) == 1


def folded(text: str) -> str:
    """Return a word without punctuation or spaces, in lower case unless it is one letter."""
    text = re.sub(r"[\s.!,'’-]+", "", TEXT.sub(r"\1", text))
    return text.strip("()").casefold() if len(text.strip("()")) > 1 else text


def by_letters(gold: str, given: str, tolerance: Tolerance) -> bool | None:
    """Compare words, codes and lists of them, ignoring case except in single letters; else None."""
    first, second = is_word(gold), is_word(given)
    if not first and not second:
        return None
    if first and second:
        lists = [sorted(map(folded, parts_of(TEXT.sub(r"\1", one)))) for one in (gold, given)]
        return folded(gold) == folded(given) or lists[0] == lists[1]
    # `x = seat` equals `seat`; a sentence that contains the word stays wrong
    named = re.sub(r"^\s*[a-zA-Z]\s*=\s*", "", given if first else gold)
    return folded(gold) == folded(named) if first else False


def by_base(gold: str, given: str, tolerance: Tolerance) -> bool | None:
    """Compare numbers like `33_4`: the digits, and the base if `given` has one; None for others."""
    first, second = BASED.fullmatch(plain_base(gold)), BASED.fullmatch(plain_base(given))
    if first is None and second is None:
        return None
    if not any(c.isdigit() for c in (first or second)[0].partition("_")[0]):  # type: ignore[index]
        return None  # a variable with an index
    digits, base = based(gold)
    given_digits, given_base = based(given)
    return digits == given_digits and base is not None and given_base in (base, None)


def numbers_equal(gold: str, given: str, tolerance: Tolerance) -> bool | None:
    """Return whether two answers are the same number; None if either is not a number."""
    first, second = units.number_of(gold), units.number_of(given)
    if first is None and second and second[1]:
        first = units.number_of(apart(gold))
    if second is None and first and first[1]:
        second = units.number_of(apart(given))
    if first is None or second is None:
        return None
    value, given_value = numbers.value_of(first[0]), numbers.value_of(second[0])
    scale = units.conversion(first[1], second[1])
    if scale is None:
        return False
    if scale != 1:
        given_value = (numbers.scaled(given_value[0], scale), given_value[1])
    return numbers.same(value, given_value, tolerance)


def apart(text: str) -> str:
    """Return `100g` as `100 g`, so that `g` is read as a unit; without the space it is a factor."""
    return re.sub(r"(?<=\d)([a-zA-Z])$", r" \1", text)


def by_number(gold: str, given: str, tolerance: Tolerance) -> bool | None:
    """Compare numbers with any units. For others, return False if units conflict, else None."""
    found = numbers_equal(gold, given, tolerance)
    if found is not None:
        return found
    first, second = units.split(gold)[1], units.split(given)[1]
    return False if units.conversion(first, second) is None else None


def by_interval(gold: str, given: str, tolerance: Tolerance) -> bool | None:
    """Compare intervals, their unions, set-builders, chains of inequalities and `x in [a, b)` with
    each other; None for other answers."""
    first, second = interval_of(gold), interval_of(given)
    if first is not None and second is not None:
        return same_interval(first, second, tolerance)
    several, others = union_of(gold), union_of(given)
    if several is not None and others is not None:
        return len(several) == len(others) and all(
            any(same_interval(one, other, tolerance) for other in others) for one in several
        )
    rules = [text for text in (gold, given) if RULED.fullmatch(text)]
    if len(rules) == 1 and BUILDER.fullmatch(rules[0]) is None:
        return False
    chain, other = chain_of(gold), chain_of(given)
    if chain is None or other is None:
        return (
            None
            if BUILDER.fullmatch(gold) is None and BUILDER.fullmatch(given) is None
            else (by_symbols(rule_of(gold), rule_of(given), tolerance))
        )
    if chain[1] != other[1]:
        return False
    return all(same(a, b, tolerance) for a, b in zip(chain[0], other[0], strict=True))


def same_interval(gold: Interval, given: Interval, tolerance: Tolerance) -> bool:
    """Return whether two intervals have the same brackets and endpoints."""
    if gold[0] + gold[3] != given[0] + given[3]:
        return False
    return bool(same(gold[1], given[1], tolerance) and same(gold[2], given[2], tolerance))


def by_list(gold: str, given: str, tolerance: Tolerance) -> bool | None:
    """Compare lists of values in any order. Return None for two single values, or if lists of
    equal length differ. A list in () or [] is ordered, so it is one value, left to `by_symbols`."""
    first, second = parts_of(gold), parts_of(given)
    if len(first) == 1 and len(second) == 1:
        if (first, second) == ((gold,), (given,)):
            return None
        return same(first[0], second[0], tolerance)  # the value in a set of one
    if len(first) != len(second):
        return same_point(gold, given, tolerance)
    return same_list(first, given, tolerance) or None


def same_point(gold: str, given: str, tolerance: Tolerance) -> bool:
    """Return whether one answer is a point and the other assigns its coordinates: `x=1, y=2`."""
    first, second = point_of(gold), point_of(given)
    if (first is None) == (second is None):
        return False
    return bool(same(first or gold, second or given, tolerance))


def same_list(
    golds: Sequence[str], given: str, tolerance: Tolerance, dialect: str = "latex"
) -> bool | None:
    """Return whether an answer contains all golds and nothing else, in any order."""
    wanted = [value for gold in golds for value in signed(gold)]
    return pairs_up(
        wanted, parts_of(clean(given)), lambda gold, part: same(gold, part, tolerance, dialect)
    )


def by_equation(gold: str, given: str, tolerance: Tolerance) -> bool | None:
    """Compare a value with an equation's right side (False unless the left side names or calculates
    the right), or the right sides of two equations with the same name on the left; else None."""
    first, second = sides_of(gold), sides_of(given)
    one_name = is_named(first[0]) and key(first[0]) == key(second[0])
    if one_name and len(first) == len(second) == 2 and not SEPARATED.search(gold + given):
        return same(first[1].strip(), second[1].strip(), tolerance)
    if (len(first) > 1) == (len(second) > 1):
        return None
    if SEPARATED.search(gold if len(first) > 1 else given):
        return None  # x = 1, y = 2: a list
    equation = first if len(first) > 1 else second
    names = equation[:-1]
    if not all(is_name(side) or (side is not names[0]) for side in names):
        return False
    value = equation[-1].strip()
    named = {side.count(":") for side in names if ":" in side}
    if not value or is_false(equation) or named - {value.count(":")}:
        return False
    return same(value, given, tolerance) if len(first) > 1 else same(gold, value, tolerance)


def is_false(sides: Sequence[str]) -> bool:
    """Return whether the last two sides of an equation are different whole numbers: 41 = 42."""
    last = [parsed(side.strip()) for side in sides[-2:] if ARITHMETIC.fullmatch(side)]
    return (
        len(last) == 2
        and all(getattr(side, "is_Integer", False) for side in last)
        and last[0] != last[1]
    )


def is_named(side: str) -> bool:
    """Return whether the left side of an equation is a single name, or a ratio of names."""
    names = map(str.strip, side.split(":"))
    return all(ONE_NAME.fullmatch(name) or QUANTITY.fullmatch(name) for name in names)


def is_name(side: str) -> bool:
    """Return whether an equation's left side only names or calculates the right (`2 + 2 = 4`)."""
    side = side.strip()
    if is_named(side):
        return True
    if not LETTERS.search(re.sub(r"\\(?:text|mathrm)\s*\{[^{}]*\}|\\[a-zA-Z]+", "", side)):
        return True
    symbols = getattr(parsed(side), "free_symbols", None)
    return symbols is not None and {str(symbol) for symbol in symbols} <= {"e", "i"}


def by_symbols(gold: str, given: str, tolerance: Tolerance) -> bool | None:
    """Compare as mathematical expressions with units; None if `given` cannot be parsed."""
    (gold_value, gold_unit), (given_value, given_unit) = units.split(gold), units.split(given)
    scale = units.conversion(gold_unit, given_unit)
    if scale is None:
        return False
    first, second = parsed(gold_value), parsed(given_value)
    if second is None:
        return None
    if first is None:
        return False
    if scale != 1 and symbolic.is_number(second):
        second = second * (symbolic.angle(scale) if units.is_angle(gold_unit) else scale)
    return symbolic.equal(first, second, tolerance)


def parsed(text: str) -> Any:
    """Parse an answer, as LaTeX or else as Python, into a sympy expression; None if both fail."""
    text = re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text)
    if "°" in text and units.TRIGONOMETRIC.search(text):
        text = re.sub(r"(\d+(?:\.\d+)?)\s*°", r"(\1\\cdot\\frac{\\pi}{180})", text)
    if ARITHMETIC.fullmatch(text):  # LaTeX's parser takes a second, Python's is instant
        product = re.sub(r"(?<=[\d)])\s*(?=\()", "*", text.replace("{", "(").replace("}", ")"))
        found = symbolic.from_python(product)
        if found is not None:
            return found
    found = symbolic.from_latex(text)
    return found if found is not None else symbolic.from_python(text)


RULES = (
    by_name,
    by_equation,
    by_time,
    by_letters,
    by_base,
    by_number,
    by_interval,
    by_list,
)  # None where a rule does not apply
