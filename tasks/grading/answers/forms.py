r"""Classify an answer by its spelling: a word, a number in a base, a list, an interval, a chain of
inequalities."""

import re
from functools import lru_cache

from tasks.grading.answers.spelling import balanced
from tasks.grading.answers.units import TEXT

FUNCTION_NAMES = {"pi", "sqrt", "sin", "cos", "tan", "log", "ln", "exp", "infinity", "oo", "inf"}
MAX_LIST = 100  # parts
BASED = re.compile(r"(-?[0-9A-Za-z]+)_\{?(\d{1,2})\}?|\((-?[0-9A-Za-z]+)\)_\{?(\d{1,2})\}?")
RELATION = re.compile(r"\\le(?![a-zA-Z])|\\ge(?![a-zA-Z])|<|>")
BUILDER = re.compile(
    r"\\?\{\s*(?P<name>[a-zA-Z])\s*(?:\\in\s*(?:\\mathbb\s*\{?R\}?|ℝ|R))?\s*"
    r"(?:\\mid(?![a-zA-Z])|\\vert(?![a-zA-Z])|\\?\||:|\\colon)\s*(?P<rule>.*?)\s*\\?\}"
)
# a set defined by another kind of rule, such as one on integers
RULED = re.compile(r"\\?\{.*[a-zA-Z].*(?:\\mid(?![a-zA-Z])|\\vert(?![a-zA-Z])|\||:).*\\?\}")
MEMBER = re.compile(r"(?P<name>[a-zA-Z])\s*\\in\s*(?P<set>[(\[].*[)\]])")
BRACKETS = re.compile(
    r"(?P<left>[(\[])(?P<low>[^,;()\[\]]+)[,;](?P<high>[^,;()\[\]]+)(?P<right>[)\]])"
)
OUTWARD = re.compile(r"([\]\[])([^()\[\]]+[,;][^()\[\]]+)([\]\[])")  # ]0, 1[
EITHER = r"(?:or|oder|ou|или)(?![^\W\d_])|[oó](?=[\s$]+[-\d$\\])"  # between two values
OR = re.compile(
    rf"\s*(?:,\s*)?(?:\\text\s*\{{\s*(?:or|或|oder|ou|или)\s*\}}|(?<![^\W\d_])(?<!\\)(?:{EITHER})"
    r"|\\lor(?![a-zA-Z])|\\vee(?![a-zA-Z])|或者?|または|또는)\s*"
)
AND = re.compile(
    r"\s*(?:,\s*)?(?:\\text\s*\{\s*,?\s*and\s*\}|(?<![a-zA-Z\\])and(?![a-zA-Z])|和|、|，|；)\s*"
)
OPENED = r"[\\$({}\s]*$"  # allowed between a word such as `not` and the number after it
BOUND = (
    r"(?:less|more|fewer|greater|smaller|larger|bigger|lower|higher)\s+than(?:\s+or\s+equal\s+to)?"
    r"|at\s+(?:least|most)|up\s+to|between(?:\s+[^\s,.]{1,20}\s+and)?|under|over|above|below|exceed\w*"
)
DENIED = re.compile(
    r"(?i)(?:\b(?:not|cannot|never|neither|nor|no\s+longer|(?:any|every)thing\s+but|all\s+but"
    r"|other\s+than|instead\s+of|rather\s+than|unlike|exclud\w+|rul\w+\s+out|reject\w*|eliminat\w+"
    rf"|(?P<bound>{BOUND}))|n['’]t|不是|并非)"
    rf"\s*\}}?\s*(?:(?:equal(?:\s+to)?|be|exactly|the\s+answer)\s+)?[:*]*{OPENED}"
)
WRONG = (
    r"(?:not|never|wrong|incorrect|false|invalid|impossible|unlikely|mistaken|out|ruled\s+out"
    r"|eliminated|discarded|rejected|(?:a|an|my)\s+(?:mistake|error))\b"
)
# what rules out the answer before it
IS_WRONG = (
    r"\s+(?:(?:(?:can|could|must|would|will|has\s+to)\s+)?(?:is|are|was|were|be|seems?|looks?)\s+"
    rf"(?:both\s+|all\s+|also\s+|the\s+|an?\s+|\w+ly\s+)?{WRONG}"
    r"|(?:is|are|was|were|does|do|did|ca|could|wo|would)n['’]t\b"
    r"|(?:cannot|(?:can|could|does|do|did|will|would)\s+not)\b)"
)
REJECTED = re.compile(
    rf"(?i)[\s$}})\]\\*]*(?:{IS_WRONG}|\s*[:(–-]+\s*(?:wrong|incorrect|false)\b"
    r"|\s+(?:\\?[^\W\d_]+\s+)?(?:or|and)\s+(?:more|less|fewer|greater|higher|lower|up|above|below|over"
    r"|under|so|something|thereabouts|whatever)\b)"
)
# words after a number that are not a unit: `42 is wrong`, `42 or more`
DOUBT = re.compile(
    r"(?i)\b(?:is|are|was|were|be|not|never|maybe|perhaps|probably|possibly|guess|think|sure|unsure"
    r"|least|most|plus|but|instead|mod|modulo|pmod|bmod|or(?!.*\d)|and(?!.*\d))\b|n['’]t\b|\?"
    r"|\b(?:wrong|incorrect|false|mistaken|no|nope)\W*$"
)
HIDDEN = re.compile(r"\\[hv]?phantom\s*\{[^{}]*[^\s{}]")
VALUE = re.compile(r"\d|\\pi(?![a-zA-Z])|π")
NEAR = 40  # characters before a number that are searched for a denial
PRODUCT = re.compile(r"[b-df-hj-np-tv-z]{2,3}|[a-d]{2,4}|[xyz][a-z]|[a-z][xyz]")
FORMULA = re.compile(r"(?:[a-zA-Z][-/])+[a-zA-Z]")  # a/b, a-b
WORD = re.compile(r"[^\W\d_][^\W_]*(?:[\s'’.,&/-]+[^\W_]+)*[.!]?")
EQUALS = re.compile(r"(?<![\\<>!:=])=(?!=)")
LETTERS = re.compile(r"(?<!\\)(?<![a-zA-Z])[a-zA-Z]+")
Interval = tuple[str, str, str, str]
Sides = tuple[tuple[str, ...], tuple[str, ...]]


def is_word(text: str) -> bool:
    r"""Return whether an answer is words or a code (`B7`), not mathematics. A letter, letters that
    are likely a formula (`xy`, `a/b`) or a phrase not in title case are words only in `\text{}`."""
    bare = TEXT.sub(r"\1", text.strip()).strip().strip(".")
    typeset = TEXT.fullmatch(text.strip()) is not None
    if not WORD.fullmatch(bare) or not re.search(r"[^\W\d_]", bare):
        return False
    letters = re.sub(r"[\W\d_]", "", bare)
    if re.search(r"\d", bare):
        return re.fullmatch(r"(?![a-z]-)[a-zA-Z]+-?\d\w*", bare) is not None  # B7, AB-12; not n-1
    if len(letters) == 1:
        return typeset and bare.isalpha()
    if typeset:
        return True
    if bare in FUNCTION_NAMES or PRODUCT.fullmatch(bare) or FORMULA.fullmatch(bare):
        return False
    return len(bare.split()) == 1 or not bare.isascii() or bare.istitle()


def is_denied(text: str, start: int, end: int) -> bool:
    """Return whether a text denies its answer at `text[start:end]`: `not 42`, `42 is wrong`. A box
    may be a bound: `at most \\boxed{42}`."""
    before = DENIED.search(text[max(start - NEAR, 0) : start])
    is_bound = before and before["bound"] and text.startswith(("\\boxed", "\\fbox"), start)
    return bool(before and not is_bound) or REJECTED.match(text, end) is not None


def is_doubted(answer: str) -> bool:
    r"""Return whether a marked answer hides text, or has words after its number that cannot be its
    unit: `42 \text{ is wrong}`, `42 (mod 50)`, `42 or more`."""
    side = answer.rpartition("=")[2]  # 17 mod 5 = 2 is no doubt
    number = VALUE.search(side)
    doubt = number is not None and DOUBT.search(side, number.end()) is not None
    return doubt or HIDDEN.search(answer) is not None


def plain_base(text: str) -> str:
    r"""Return the text without spaces, and with one spelling of a base: `_{5}` for
    `_{\text{base 5}}` and `_{(5)}`."""
    text = re.sub(r"\\(?:text|mathrm)\s*\{\s*(?:base\s*)?(\w*)\s*\}", r"\1", text)
    return re.sub(r"_\{?\((\d{1,2})\)\}?", r"_{\1}", text).replace(" ", "")


def based(text: str) -> tuple[str, str | None]:
    """Return the digits and the base of a number such as `33_4`; the base is None if not given."""
    text = plain_base(text)
    found = BASED.fullmatch(text)
    if found is None:
        return text.casefold(), None
    return (found[1] or found[3]).casefold(), found[2] or found[4]


def rule_of(text: str) -> str:
    r"""Return a set-builder's condition (`x > 2` in `\{x \mid x > 2\}`), or the text itself."""
    found = BUILDER.fullmatch(text)
    return found["rule"] if found else text


@lru_cache(maxsize=4096)
def interval_of(text: str) -> Interval | None:
    """Return (left bracket, low, high, right bracket) of an interval, `x in [a, b)`, a set-builder,
    or inequalities in one variable; None for any other text."""
    if member := MEMBER.fullmatch(text):
        text = member["set"]
    if outward := OUTWARD.fullmatch(text):
        left, right = ("[" if outward[1] == "[" else "("), ("]" if outward[3] == "]" else ")")
        text = left + outward[2] + right
    if brackets := BRACKETS.fullmatch(text.replace(" ", "")):
        return brackets["left"], brackets["low"], brackets["high"], brackets["right"]
    text = rule_of(text)
    chain = chain_of(text, shortest=2)
    if chain is None:
        return None
    sides, signs = chain
    variable = re.compile(r"[a-zA-Z]")
    if len(sides) == 3 and variable.fullmatch(sides[1]):
        low, high = sides[0], sides[2]
        return ("[" if signs[0] == r"\le" else "("), low, high, ("]" if signs[1] == r"\le" else ")")
    if len(sides) == 2 and variable.fullmatch(sides[0]) and not LETTERS.search(sides[1]):
        return "(", r"-\infty", sides[1], "]" if signs[0] == r"\le" else ")"
    if len(sides) == 2 and variable.fullmatch(sides[1]) and not LETTERS.search(sides[0]):
        return "[" if signs[0] == r"\le" else "(", sides[0], r"\infty", ")"
    return None


def union_of(text: str) -> tuple[Interval, ...] | None:
    r"""Return the intervals of a union (`(0, 2) \cup (3, 4)`, `x < 2 or x > 3`), or None."""
    if member := MEMBER.fullmatch(text):
        text = member["set"]
    parts = re.split(rf"\\cup(?![a-zA-Z])|{OR.pattern}", rule_of(text))
    found = [interval_of(part.strip()) for part in parts]
    known = tuple(interval for interval in found if interval is not None)
    return known if len(known) == len(parts) > 1 else None


@lru_cache(maxsize=4096)
def chain_of(text: str, shortest: int = 3) -> Sides | None:
    """Return the sides (at least `shortest`) of a chain of inequalities in ascending order, and the
    signs between them, `<` or `\\le`; None for any other text."""
    signs = [found.strip() for found in RELATION.findall(text)]
    sides = [side.strip() for side in RELATION.split(text)]
    if len(sides) < shortest or not all(sides) or "=" in text or "," in text:
        return None
    falling = [sign in (">", r"\ge") for sign in signs]
    if any(falling) != all(falling):
        return None
    if falling[0]:
        sides.reverse()
        signs = [{">": "<", r"\ge": r"\le"}[sign] for sign in reversed(signs)]
    return tuple(sides), tuple(signs)


@lru_cache(maxsize=4096)
def parts_of(text: str) -> tuple[str, ...]:
    """Return the values in a list such as `1, 2`, `1 and 2`, `5 or 6` or `\\{1, 2\\}`; the points
    `(1, 2)` and `(3, 4)` for `x=1, y=2; x=3, y=4` (`or` may replace `;`); else the answer alone."""
    pieces = re.split(rf";|{OR.pattern}", text) if "=" in text else []
    if len(pieces) > 1:
        points = [point_of(part) for part in pieces]
        if None not in points:
            return tuple(point for point in points if point is not None)
    inner = re.fullmatch(r"\\\{(.*)\\\}|\{(.*)\}", text)
    if inner and balanced(next(g for g in inner.groups() if g is not None)) and "|" not in text:
        text = next(group for group in inner.groups() if group is not None)
    if re.search(r"\\begin|\\in(?![a-zA-Z])", text):
        return (text,)
    text = AND.sub(",", OR.sub(",", text))
    if re.fullmatch(r"[-+]?\\?\$?\d{1,3}(?:(?:,|\{,\})\d{3})+(?:\.\d+)?[^,]*", text):
        return (text,)  # 1,000
    parts: list[str] = []
    start = depth = 0
    for place, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if character in ",;" and depth == 0:
            parts.append(text[start:place].strip())
            start = place + 1
    parts.append(text[start:].strip())
    whole = all(parts) and len(parts) <= MAX_LIST and depth == 0
    return tuple(value for part in parts for value in signed(part)) if whole else (text,)


def signed(text: str) -> tuple[str, ...]:
    r"""Return both values of `2 \pm \sqrt{3}`, or the single value."""
    if len(re.findall(r"\\pm(?![a-zA-Z])|\\mp(?![a-zA-Z])", text)) != 1:
        return (text,)
    first, second = (re.sub(r"\\[pm][mp](?![a-zA-Z])", sign, text) for sign in "+-")
    return first.strip(), second.strip()


def point_of(text: str) -> str | None:
    """Return `x = 1, y = 2` as the point `(1, 2)`, in alphabetical order of names; else None."""
    sides = [re.fullmatch(r"\s*([a-zA-Z])\s*=\s*([^=]+)", part) for part in parts_of(text)]
    known = sorted((side[1], side[2].strip()) for side in sides if side)
    if len(sides) < 2 or len({name for name, _ in known}) < len(sides):
        return None
    return "(" + ", ".join(value for _, value in known) + ")"


def sides_of(text: str) -> list[str]:
    """Return the sides of an equation; an equals sign in brackets does not count: `P(X=1)=0.3`."""
    sides, start = [], 0
    for sign in EQUALS.finditer(text):
        side = text[start : sign.start()]
        if all(side.count(a) == side.count(b) for a, b in ("()", "[]", "{}")):
            sides.append(side)
            start = sign.end()
    return [*sides, text[start:]]
