r"""`numeric`: the number that the completion ends on equals the gold, exactly (1,000 = 1000.0, 0.5
= 1/2).

If the completion marks its answer, by GSM8K's `####` or by a box, the number is taken from there.
Commas, currency signs and units in brackets (`9 (apples)`) are dropped; fractions, mixed numbers
and LaTeX's fractions are parsed; 28% equals both 28 and 0.28. Left out: words for numbers, roots,
powers, tolerance."""

import re
from decimal import Decimal
from fractions import Fraction
from functools import lru_cache

from tasks.grading.answers import last_boxed
from tasks.grading.verdict import Verdict

INTEGER = r"(?:\d{1,3}(?:(?:,|\{,\}|,\\!)\d{3})++(?!\d)|\d++)"
NUMBER = re.compile(
    r"(?<![\w.^])(?P<sign>[-+]?)\\?[$€£]?(?:"
    r"(?:(?P<whole>\d{1,18}) ?)?\\[dt]?frac *"
    r"(?:\{ *(?P<top>\d{1,300}) *\} *\{ *(?P<bottom>\d{1,300}) *\}|(?P<digits>\d\d))"
    rf"|(?<!/)(?:(?P<whole2>\d{{1,18}}) )?(?P<top2>{INTEGER}) ?/ ?(?P<bottom2>{INTEGER})"
    rf"(?! ?/|\.\d)"
    rf"|(?P<decimal>(?:{INTEGER}(?:\.\d++)?|\.\d++)(?:[eE][-+]?\d{{1,3}}(?!\w))?)"
    r")(?P<percent>\s?(?:\\?%|percent\b))?"
)
UNIT = re.compile(r"(?<=[\d%]) ?\((?=[^()]{0,40}[^\W\d_])[^()]{1,40}\)")

DROPPED = re.compile(r",\\!|\{,\}|[,$€£]")

Number = Decimal | Fraction


def verify(completion: str, answer: str) -> Verdict:
    """`correct`, `wrong`, or `unparsed` when the completion has no number. A gold without a number
    is an error."""
    gold = read_gold(answer)
    given = find_number(completion)
    if gold is None:
        return Verdict("error", f"the gold answer {answer[:80]!r} has no number")
    if given is None:
        return Verdict("unparsed", "")
    return Verdict("correct" if same(gold, read(given)) else "wrong", plain(given))


@lru_cache(maxsize=1024)
def read_gold(answer: str) -> tuple[Number, bool] | None:
    """Return the gold's number; it is cached, since the completions of a group share it."""
    found = find_number(answer)
    return None if found is None else read(found)


def find_number(text: str) -> re.Match[str] | None:
    """Return the number after the text's last `####`, else the last in its last box, else the last
    in the text."""
    if not text.isascii():
        text = text.replace("\N{MINUS SIGN}", "-")
    if "####" in text:
        return NUMBER.search(UNIT.sub("", text[text.rindex("####") + 4 :]).lstrip(": "))
    return last_number(last_boxed(text) or "") or last_number(text)


def last_number(text: str) -> re.Match[str] | None:
    """Return the last number of `text`, ignoring units in brackets."""
    found = None
    for found in NUMBER.finditer(UNIT.sub("", text) if "(" in text else text):  # noqa: B007
        pass
    return found


def plain(found: re.Match[str]) -> str:
    """Return the number as written, without commas, currency signs and outer blanks."""
    return DROPPED.sub("", found[0]).rstrip("\\").strip()


def read(found: re.Match[str]) -> tuple[Number, bool]:
    """Return its value, and whether it is a percentage (the value is the number before the
    sign)."""
    decimal = found["decimal"]
    percent = found["percent"] is not None
    value: Number
    if decimal is not None:
        value = Decimal(DROPPED.sub("", decimal))
    else:
        whole, top, bottom = (
            int(DROPPED.sub("", found[name] or found[f"{name}2"] or "0"))
            for name in ("whole", "top", "bottom")
        )
        if found["digits"]:
            top, bottom = map(int, found["digits"])
        if bottom == 0:
            return Decimal("nan"), percent
        value = whole + Fraction(top, bottom)
    return -value if found["sign"] == "-" else value, percent


def same(gold: tuple[Number, bool], given: tuple[Number, bool]) -> bool:
    """Whether two numbers are equal. If only one of them has a percent sign, 28% equals both 28 and
    0.28."""
    if gold[1] == given[1]:
        return equal(gold[0], given[0])
    percentage, other = (gold[0], given[0]) if gold[1] else (given[0], gold[0])
    return equal(percentage, other) or equal(percentage, exactly(other) * 100)


def equal(a: Number, b: Number) -> bool:
    """Whether two numbers are exactly equal. Two decimals are compared directly, which is fast for
    any number of digits."""
    if isinstance(a, Decimal) and isinstance(b, Decimal):
        return a == b
    return exactly(a) == exactly(b)


def exactly(number: Number) -> Number:
    """Return the number as a fraction; not-a-number (x / 0) stays as it is and equals nothing."""
    return Fraction(number) if number == number else number
