r"""Parse numbers exactly, as people type them: `1,000`, `-$5.00`, `28\%`, `2 1/2`, `\frac{1}{3}`,
`71.\overline{3}`, `3e6`, `2.1\times 10^{-8}`, `10^-2`. Unsupported: words, roots, other powers."""

import re
import unicodedata
from dataclasses import dataclass
from decimal import Context, Decimal
from fractions import Fraction

INTEGER = r"(?:\d{1,3}(?:(?:,|\{,\}|,\\!|\\,)\d{3})++(?!\d)|\d++)"
TIMES = r"(?:\\times|\\cdot|[×·*]|(?<=[\d ])x(?=[ \d]))"
EXPONENT = (
    r"(?:\^|\*\*) ?"
    r"(?:\{{ *(?P<{0}>[-+]?\d{{1,4}}) *\}}|\(? ?(?P<{0}_bare>[-+]?\d{{1,4}})(?!\d) ?\)?)"
)
NUMBER = re.compile(
    r"(?<![a-zA-Z0-9_.^])(?<!\^[{-])(?<!\^\{-)(?P<sign>[-+]?)\\?[$€£¥]?(?:"
    r"(?:(?P<whole>\d{1,18}) ?)?\\[dtc]?frac *"
    r"(?:\{ *(?P<top>\d{1,300}) *\} *\{ *(?P<bottom>\d{1,300}) *\}|(?P<digits>\d\d))"
    rf"|(?<!/)(?:(?P<whole2>\d{{1,18}}) )?(?P<top2>{INTEGER}) ?/ ?(?P<bottom2>{INTEGER})"
    r"(?! ?/|\.\d)"
    r"|(?P<before>\d{0,18})\.(?P<after>\d{0,18})\\(?:overline|bar|dot) *"
    r"\{ *(?P<repeated>\d{1,18}) *\}"
    rf"|10 ?{EXPONENT.format('power')}"
    rf"|(?P<decimal>(?:{INTEGER}(?:\.\d++)?|\.\d++)(?:[eE][-+]?\d{{1,4}}(?!\w))?)"
    rf"(?: ?{TIMES} ?10 ?{EXPONENT.format('exponent')})?"
    r")(?P<percent>\s?(?:\\?%|percent\b))?"
)
DROPPED = re.compile(r",\\!|\\,|\{,\}|[,$€£¥]")
SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺", "0123456789-+")
RAISED = re.compile(r"(?<=[\w)\]}])([⁻⁺]?[⁰¹²³⁴⁵⁶⁷⁸⁹]{1,4})")
# an en dash is a minus sign unless it follows a number, word or bracket
DASH = re.compile(r"(?<![\w)\]}])(?<![\w)\]}] )–(?=[\d.\\])")
SPACES = re.compile(r"[\u00a0\u2000-\u200a\u202f\u205f\u3000]")
VULGAR = re.compile(r"[¼½¾⅐-⅞]")
ONES = [
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven",
    "twelve", "thirteen", "fourteen", "fifteen", "sixteen", "seventeen", "eighteen", "nineteen",
]  # fmt: skip
TENS = ["twenty", "thirty", "forty", "fifty", "sixty", "seventy", "eighty", "ninety"]
SCALES = {"hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9}
COUNTS = dict(zip(ONES, range(20), strict=True)) | dict(zip(TENS, range(20, 100, 10), strict=True))
TWO = rf"(?:(?:{'|'.join(TENS)})(?:[- ](?:{'|'.join(ONES[1:10])}))?|{'|'.join(ONES[::-1])})"
THREE = rf"{TWO}(?: hundred(?: (?:and )?{TWO})?)?"
SPELLED = re.compile(rf"(?i)\b{THREE}(?: (?:thousand|[mb]illion)\b(?:,? (?:and )?{THREE})?)*\b")
WIDE = Context(prec=10**6, Emax=10**8, Emin=-(10**8))

Number = Decimal | Fraction


@dataclass(frozen=True)
class Tolerance:
    """The allowed deviation of a number from the gold: `absolute`, or `relative` times the gold's
    absolute value, whichever is larger; both are 0 for exact equality."""

    relative: float = 0.0
    absolute: float = 0.0


EXACT = Tolerance()


def typed(text: str) -> str:
    """Return the text with its minus signs and spaces in ASCII, and with full-width digits,
    superscripts and single-character fractions (½) converted to ASCII or LaTeX."""
    if text.isascii():
        return text
    text = (
        SPACES.sub(" ", text)
        .replace("\N{MINUS SIGN}", "-")
        .replace("\N{FULLWIDTH PERCENT SIGN}", "%")
        .replace("\N{FRACTION SLASH}", "/")
        .replace("\N{DIVISION SLASH}", "/")
    )
    text = VULGAR.sub(vulgar, DASH.sub("-", text))
    text = RAISED.sub(lambda found: "^{" + found[1].translate(SUPERSCRIPTS) + "}", text)
    return text.translate({0xFF10 + digit: str(digit) for digit in range(10)})


def spelled(text: str) -> str:
    """Return the text with its number words in digits: `twenty-one apples` is `21 apples`."""
    return SPELLED.sub(lambda found: str(count_of(found[0])), text)


def count_of(words: str) -> int:
    """Return the value of number words such as `two thousand one hundred and five`."""
    total = part = 0
    for word in re.findall(r"\b(?!and\b)[a-z]+", words.lower()):
        if SCALES.get(word, 0) > 100:
            total, part = total + part * SCALES[word], 0
        else:
            part = part * SCALES[word] if word in SCALES else part + COUNTS[word]
    return total + part


def vulgar(match: re.Match[str]) -> str:
    """Return the LaTeX of a single-character fraction such as ½."""
    top, bottom = unicodedata.normalize("NFKC", match[0]).split("\N{FRACTION SLASH}")
    return rf"\frac{{{top}}}{{{bottom}}}"


def plain(match: re.Match[str]) -> str:
    """Return the number as written, without commas, currency signs or surrounding spaces."""
    return DROPPED.sub("", match[0]).rstrip("\\").strip()


def value_of(match: re.Match[str]) -> tuple[Number, bool]:
    """Return the value of a match of NUMBER, and whether it is a percentage (the value is then the
    number before the percent sign)."""
    percent = match["percent"] is not None
    value = unsigned(match)
    return -value if match["sign"] == "-" else value, percent


def unsigned(match: re.Match[str]) -> Number:
    """Return the absolute value of a match of NUMBER."""
    if match["decimal"] is not None:
        value = Decimal(DROPPED.sub("", match["decimal"]))
        exponent = match["exponent"] or match["exponent_bare"]
        return value.scaleb(int(exponent), WIDE) if exponent else value
    if power := match["power"] or match["power_bare"]:
        return Decimal(1).scaleb(int(power), WIDE)
    if repeated := match["repeated"]:
        before, after = match["before"], match["after"]
        nines = 10 ** len(repeated) - 1
        head = Fraction(int(before + after or "0"), 10 ** len(after))
        return head + Fraction(int(repeated), nines * 10 ** len(after))
    whole, top, bottom = (
        int(DROPPED.sub("", match[name] or match[f"{name}2"] or "0"))
        for name in ("whole", "top", "bottom")
    )
    if match["digits"]:
        top, bottom = map(int, match["digits"])
    return whole + Fraction(top, bottom) if bottom else Decimal("nan")


def same(
    gold: tuple[Number, bool], given: tuple[Number, bool], tolerance: Tolerance = EXACT
) -> bool:
    """Return whether two numbers are equal. If only one has a percent sign, 28% equals both 28 and
    0.28."""
    if gold[1] == given[1]:
        return equal(gold[0], given[0], tolerance)
    if gold[1]:
        hundredfold = gold[0], scaled(given[0], Fraction(100))
    else:
        hundredfold = scaled(gold[0], Fraction(100)), given[0]
    return equal(gold[0], given[0], tolerance) or equal(*hundredfold, tolerance)


def scaled(number: Number, factor: Fraction) -> Number:
    """Return a number times a factor, as a fraction; NaN is returned unchanged."""
    number = exactly(number)
    return number * factor if isinstance(number, Fraction) else number


def equal(gold: Number, given: Number, tolerance: Tolerance = EXACT) -> bool:
    """Return whether two numbers are equal, exactly or within a tolerance. Without one, two
    Decimals are compared directly, which is fast for any number of digits."""
    if isinstance(gold, Decimal) and isinstance(given, Decimal) and tolerance == EXACT:
        return gold == given
    gold, given = exactly(gold), exactly(given)
    if tolerance == EXACT or not (isinstance(gold, Fraction) and isinstance(given, Fraction)):
        return gold == given
    allowed = max(Fraction(str(tolerance.absolute)), Fraction(str(tolerance.relative)) * abs(gold))
    return abs(gold - given) <= allowed


def exactly(number: Number) -> Number:
    """Return the number as a fraction. NaN (x / 0) is returned unchanged, and equals nothing."""
    return Fraction(number) if number == number else number
