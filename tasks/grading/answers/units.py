r"""Units of measurement after a number: their names, and conversions between them.

A unit counts only after a number: in `\text{}` or `\mathrm{}`, or in plain letters if it is in the
table below. A single letter requires a space before it, because `5m` is a product. Known units of
the same dimension are converted (`1 m` is `100 cm`). Words in `\text{}` that are not a known unit
(`9 \text{ apples}`) are dropped, as are words in brackets."""

import re
from dataclasses import dataclass
from fractions import Fraction
from functools import cache

from tasks.grading.answers.numbers import NUMBER

# dimension -> names of a unit, separated by spaces, and its size in base units (m, kg, s, ...)
TABLE: dict[str, dict[str, str]] = {
    "length": {
        "m metre meter 米": "1",
        "cm centimetre centimeter 厘米": "1/100",
        "mm millimetre millimeter 毫米": "1/1000",
        "km kilometre kilometer 千米 公里": "1000",
        "dm decimetre decimeter 分米": "1/10",
        "nm nanometre nanometer": "1/1000000000",
        "in inch inches": "127/5000",
        "ft foot feet": "381/1250",
        "yd yard": "1143/1250",
        "mi mile": "201168/125",
    },
    "mass": {
        "kg kilogram 千克 公斤": "1",
        "g gram 克": "1/1000",
        "mg milligram": "1/1000000",
        "lb lbs pound": "45359237/100000000",
        "oz ounce": "45359237/1600000000",
        "tonne ton 吨": "1000",
    },
    "time": {
        "s sec second 秒": "1",
        "ms millisecond": "1/1000",
        "min minute 分钟": "60",
        "h hr hour 小时": "3600",
        "day 天": "86400",
        "week 周": "604800",
        "month 月": "2629746",
        "yr year 年": "31556952",
    },
    "volume": {
        "L l liter litre 升": "1/1000",
        "mL ml milliliter millilitre 毫升": "1/1000000",
        "gal gallon": "3785411784/1000000000000",
    },
    "angle": {"degree deg ° 度": "1", "rad radian": "180/3.141592653589793"},
    "money": {"dollar usd 美元": "1", "cent ¢": "1/100"},
    "euro": {"euro eur": "1"},
    "pounds sterling": {"gbp": "1"},
    "yuan": {"yuan rmb 元": "1"},
    "rupee": {"rupee rs inr": "1"},
    "speed": {"mph": "1397/3125", "kmh kph": "5/18"},
    "force": {"N newton": "1", "kN": "1000"},
    "energy": {
        "J joule": "1",
        "kJ": "1000",
        "eV": "1.602176634e-19",
        "cal calorie": "4.184",
        "erg": "1e-7",
    },
    "power": {"W watt": "1", "kW": "1000"},
    "voltage": {"V volt": "1", "mV": "1/1000", "kV": "1000"},
    "current": {"ampere amp": "1", "mA": "1/1000"},
    "resistance": {"ohm Ω": "1"},
    "temperature": {"K kelvin": "1"},
    "celsius": {"celsius": "1"},
    "fahrenheit": {"fahrenheit": "1"},
    "frequency": {"Hz hertz": "1", "kHz": "1000", "MHz": "1000000", "GHz": "1000000000"},
    "pressure": {"Pa pascal": "1", "kPa": "1000", "atm": "101325"},
    "amount": {"mol mole": "1"},
    "magnetism": {"tesla": "1", "gauss": "1/10000"},
}  # fmt: skip
MADE_OF = {  # derived dimensions
    "volume": {"length": 3},
    "speed": {"length": 1, "time": -1},
    "frequency": {"time": -1},
    "force": {"mass": 1, "length": 1, "time": -2},
    "energy": {"mass": 1, "length": 2, "time": -2},
    "power": {"mass": 1, "length": 2, "time": -3},
    "pressure": {"mass": 1, "length": -1, "time": -2},
}
CURRENCIES = {"$": "money", "€": "euro", "£": "pounds sterling", "¥": "yuan"}
COUNTS = {
    "dozen": 12, "hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9,
    "trillion": 10**12, "万": 10**4, "亿": 10**8,
}  # fmt: skip
POWERS = {"square": 2, "sq": 2, "cubic": 3, "cu": 3, "平方": 2, "立方": 3}
MAX_UNIT = 300  # characters of a unit
WORD = r"(?:[^\W\d_]+|°|¢)"
RAISED = {"²": 2, "³": 3}
# one unit with its power, in LaTeX or plain: cm^2, cm^{2}, cm², square centimetres
PART = re.compile(
    rf"(?:(?P<prefix>square|sq|cubic|cu|平方|立方)\.?\s*)?(?P<word>{WORD})\.?"
    r"\s*(?:\^?\s*\{?\s*(?P<power>-?[123])\s*\}?|(?P<raised>[²³]))?"
)
TEXT = re.compile(
    r"\\(?:text(?:rm|bf|it|sf|tt|up|normal)?|math(?:rm|bf|it|sf|tt)|mbox|operatorname|rm|emph)\s*\{([^{}]*)\}"
)
SPACE = re.compile(r"\\[ ,;:!]|~|\\q?quad|\$")
DEGREES = re.compile(r"\^\s*\{?\s*\\circ\s*\}?|\\degree(?![a-zA-Z])")
TEMPERATURE = re.compile(
    r"°\s*(?:\\(?:text|mathrm)\s*\{\s*(?P<set>[CF])\s*\}|(?P<bare>[CF])(?![a-zA-Z]))|(?P<one>[℃℉])"
)
FRACTION = re.compile(
    r"(?<=[\d}\s])\\frac\s*\{\s*\\(?:text|mathrm)\s*\{([^{}]*)\}\s*\}"
    r"\s*\{\s*\\(?:text|mathrm)\s*\{([^{}]*)\}\s*\}"
)
TRIGONOMETRIC = re.compile(r"\\?(?:sin|cos|tan|cot|sec|csc)(?![a-z])[^+=]*°")  # sin 45°
# a function at the end: \sec^2, \log_2
FUNCTION = re.compile(r"\\(?!pi(?![a-zA-Z]))[a-zA-Z]+\s*(?:[_^]\s*(?:\{[^{}]{0,20}\}|\w)\s*){1,2}$")
# a unit in letters, after a number: a single letter requires a space before it
BEHIND = re.compile(rf"(?P<gap>\s*)(?P<unit>(?:(?:square|sq|cubic|cu)\.?\s+)?{WORD}[^=]{{0,30}})$")
# in brackets: 9 (m), 9(cm), 9(apples), but not 9(m), 9(a-b), 9*(m/s)
BRACKET = re.compile(r"(?:(?<=[\d)\]}%])|(?<=\\pi))(?:\s+\(|\((?!\w\)))[^()0-9+*^=]{1,40}\)$")
IN_WORDS = re.compile(r"(?:\s+\([^\\]*[^\W\d_]{3}|\([^\\]*[^\W\d_]{4})[^\\]*")
COUNTED = re.compile(r"(?P<value>.*[\d}\)]) (?P<word>[a-z]{3,}(?: [a-z]{3,}){0,3})")


@dataclass(frozen=True)
class Unit:
    """A unit as powers of dimensions, its size in base units (metre, kilogram, second, ...), and
    the factor of a count word before it (`million` is 10^6)."""

    dimensions: tuple[tuple[str, int], ...] = ()
    size: Fraction = Fraction(1)
    count: Fraction = Fraction(1)


NONE = Unit()


@cache
def names() -> dict[str, tuple[str, Fraction]]:
    """Return (dimension, size in base units) of every unit, by each of its names."""
    return {
        name: (dimension, ratio(size))
        for dimension, units in TABLE.items()
        for known, size in units.items()
        for name in known.split()
    }


def ratio(text: str) -> Fraction:
    """Parse `a`, `a/b` or a decimal, and return its value."""
    top, _, bottom = text.partition("/")
    return Fraction(top) / Fraction(bottom or 1)


def known(word: str) -> tuple[str, Fraction] | None:
    """Return the dimension and size of the unit named `word`, singular or plural, or None."""
    lower = word if len(word) <= 2 else word.lower()
    for name in (word, lower, lower.removesuffix("s"), lower.removesuffix("es")):
        if name in names() and (len(name) > 1 or name == word):
            return names()[name]
    return None


def read(text: str) -> Unit | None:
    """Return the unit in a text (`cm`, `m/s^2`, `square feet`, `miles per hour`), or None if any
    part of it is not in the table."""
    text = (
        SPACE.sub(" ", DEGREES.sub("°", TEXT.sub(r" \1 ", text))).replace("{", "").replace("}", "")
    )
    text = re.sub(r"\s+per\s+", "/", text.strip(" .,;"))
    above, *below = text.split("/")
    powers: dict[str, int] = {}
    size = count = Fraction(1)
    for sign, side in ((1, above), *((-1, side) for side in below)):
        place, has_unit = 0, False
        while place < len(side):
            if side[place] in " ·*()-" or side.startswith(r"\cdot", place):
                place += 5 if side[place] == "\\" else 1
                continue
            match = PART.match(side, place)
            if match and match["word"].lower().removesuffix("s") in COUNTS:
                count *= COUNTS[match["word"].lower().removesuffix("s")]
                place = match.end()
                continue
            unit = known(match["word"]) if match else None
            if match is None or unit is None:
                return None
            power = int(match["power"] or RAISED.get(match["raised"] or "", 1))
            power *= POWERS.get(match["prefix"] or "", 1) * sign
            for dimension, times in MADE_OF.get(unit[0], {unit[0]: 1}).items():
                powers[dimension] = powers.get(dimension, 0) + power * times
            size *= unit[1] ** power
            place, has_unit = match.end(), True
        if not has_unit and side is not above:
            return None
    if not powers and count == 1:
        return None
    dimensions = tuple(sorted((name, power) for name, power in powers.items() if power))
    return Unit(dimensions, size, count)


def conversion(gold: Unit | None, given: Unit | None) -> Fraction | None:
    """Return the factor that converts a value from the unit of the answer to the unit of the gold;
    None if they measure different quantities. An unknown or missing unit is assumed to match the
    other one."""
    gold, given = gold or NONE, given or NONE
    scale = given.count / gold.count
    if not gold.dimensions or not given.dimensions:
        return scale
    return scale * given.size / gold.size if gold.dimensions == given.dimensions else None


def is_angle(unit: Unit | None) -> bool:
    """Return whether a unit measures angles, whose conversion factor is irrational."""
    return unit is not None and unit.dimensions == (("angle", 1),)


def split(text: str) -> tuple[str, Unit | None]:
    r"""Return an answer without the unit at its end, and the unit (None if there is none, or if it
    is not in the table). The answer is unchanged if the rest is not a number (`x+5 cm`), a plain
    word is not in the table (`9 apples`), or a letter follows without a space (`2s`)."""
    text = FRACTION.sub(r"\\text{\1/\2}", DEGREES.sub("°", text)).strip()
    text = TEMPERATURE.sub(temperature, text)
    if TRIGONOMETRIC.search(text):
        return text, None
    typeset = trailing_text(text)
    if typeset is not None:
        value = text[:typeset].rstrip()
        return (value, read(text[typeset:])) if is_numeric(value) else (text, None)
    cut = BRACKET.search(text)
    words = TEXT.sub(r"\1", cut[0]) if cut else ""
    if cut and is_numeric(text[: cut.start()]) and (IN_WORDS.fullmatch(words) or read(words)):
        return text[: cut.start()], read(cut[0])
    start = last_of_value(text)
    match = BEHIND.match(SPACE.sub(" ", text[start:]))
    if start == 0 or match is None or not is_numeric(text[:start]):
        return text, None
    unit = read(match["unit"])
    lone = len(match["unit"].strip()) == 1 and match["unit"].isalpha() and match["unit"].isascii()
    if unit is None or (lone and not match["gap"]):
        return text, None
    return text[:start].rstrip(), unit


def temperature(match: re.Match[str]) -> str:
    """Return the spelled-out name of a matched °C or °F."""
    is_celsius = (match["set"] or match["bare"] or match["one"]) in ("C", "℃")
    return " celsius" if is_celsius else " fahrenheit"


def trailing_text(text: str) -> int | None:
    r"""Return the index at which the `\text{...}` at the end of an answer starts (the first one, if
    several are adjacent; each may have a power); None if there is none."""
    window = max(len(text) - MAX_UNIT, 0)  # the search takes quadratic time
    found = re.search(
        rf"(?:(?:{SPACE.pattern}|\s)*(?:{TEXT.pattern})(?:\s*\^\s*(?:\d|\{{-?\d\}}))?(?:\s*/\s*|\\cdot)?)+"
        r"[.\s]*$",
        text[window:],
    )
    return window + found.start() if found else None


def last_of_value(text: str) -> int:
    """Return the index at which a unit in plain letters starts: after the last digit, closing
    bracket, percent sign or pi outside the unit's exponent (`5 m^2`); 0 if there is none."""
    found = list(re.finditer(r"[\d)}\]%]|\\pi(?![a-zA-Z])|π", text))
    exponent = re.search(r"[^\W\d_]\s*\^\s*\{?-?[123]\}?\s*$|[^\W\d_][23]\s*$", text)
    if exponent:
        found = [place for place in found if place.end() <= exponent.start()]
    return found[-1].end() if found else 0


def is_numeric(text: str) -> bool:
    r"""Return whether an expression is a number: it has digits or pi, and no other letters except
    in LaTeX commands and the `e` of an exponent."""
    if FUNCTION.search(text):
        return False  # the text after the function is its argument
    bare = re.sub(r"\\[a-zA-Z]+|(?<=\d)[eE](?=[-+]?\d)|π|\bpi\b", " ", text)
    return bool(re.search(r"\d|π|\\pi", text)) and not re.search(r"[^\W\d_]", bare)


def number_of(text: str) -> tuple[re.Match[str], Unit | None] | None:
    """Return the match of NUMBER and the unit of an answer that is a single number; else None."""
    value, unit = split(text)
    if unit is None and (counted := COUNTED.fullmatch(value)):
        value = counted["value"]
    value = value.strip().removeprefix("+")
    if re.fullmatch(r"\{[^{}]*\}|\([^()]*\)", value):
        value = value[1:-1].strip()
    if len(value) > 1 and value[0] == "-" and value[1] == " ":
        value = "-" + value[1:].strip()
    found = NUMBER.fullmatch(re.sub(r"^(-?)\s*\\?\$\s*", r"\1", value))
    if found is None:
        return None
    sign = next((sign for sign in CURRENCIES if sign in value), None)
    return found, unit if unit or not sign else Unit(((CURRENCIES[sign], 1),))
