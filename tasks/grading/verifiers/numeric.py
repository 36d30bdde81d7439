r"""`numeric`: the number that the completion ends on equals the gold, exactly (1,000 = 1000.0, 0.5
= 1/2) or within a tolerance.

If the completion marks its answer, by GSM8K's `####` or by a box, the number is taken from there.
Commas and currency signs are dropped; fractions, mixed numbers, LaTeX's fractions and powers of ten
(2.1\times 10^{-8}) are parsed; 28% equals both 28 and 0.28. Where gold and answer both name a known
unit, it counts: 5 m is not 5 cm. `5 or 6` is no answer. Golds may list several answers or carry a
tolerance (`tasks.grading.golds`). Left out: words for numbers, roots, other powers."""

import re
from functools import lru_cache

from tasks.grading import numbers, units
from tasks.grading.answers import last_boxed
from tasks.grading.forms import EITHER
from tasks.grading.golds import read_gold
from tasks.grading.numbers import NUMBER, Number, plain, typed, value_of
from tasks.grading.pairing import pairs_up
from tasks.grading.units import Unit
from tasks.grading.verdict import Verdict

ANSWERS = True
REFUSES_COPIES = True

UNIT = re.compile(r"(?<=[\d%]) ?\((?=[^()]{0,40}[^\W\d_])[^()]{1,40}\)")
HEDGE = re.compile(rf"\s*(?:,\s*)?(?:\b(?:{EITHER})\b|或者?|または|또는)\s*\\?[$(]?")
# a letter that touches the number makes it a term of an expression: 2s, 5-5c
TERM = re.compile(r"[^\W\d_]|_")
# a number of the answer that is only a part of an expression: 42x, 42^2, \\sqrt{42}, 0,42
PART_AHEAD = re.compile(r"[a-zA-Z](?![^\W_])|\s?\^")
PART_BEFORE = re.compile(r"(?:sqrt\s*[{(]?\s*|(?<![\d.,])0,)$")
BEHIND = 40  # characters behind a number in which its unit is looked for
MAX_NUMBERS = 100  # of an answer that must give several
MARKED = re.compile(r"\\boxed|####")  # then all its numbers count, else the last
WORDS = re.compile(r"(?!(?:and|or)\b)\b[^\W\d_]{2,}")

Found = tuple[tuple[Number, bool], Unit | None]


def verify(completion: str, answer: str, *, relative_tolerance: float | None = None) -> Verdict:
    """`correct`, `wrong`, or `unparsed` when the completion has no number. A gold without a number,
    or with a number that is only a term of an expression, is an error."""
    gold = read_gold(answer, relative_tolerance)
    wanted = [number_in_gold(text) for text in gold.answers]
    if None in wanted:
        unread = gold.answers[wanted.index(None)]
        return Verdict("error", f"the gold answer {unread[:80]!r} has no number")
    text = answer_part(typed(completion))
    found = all_numbers(text) if gold.all_of_them else last_number(text)
    if not found:
        return Verdict("unparsed", "")
    given = [(value_of(number), unit_behind(text, number)) for number in found]
    shown = ", ".join(map(plain, found))
    if not gold.all_of_them and is_part(text, found[-1]):
        return Verdict("wrong", shown)
    if gold.all_of_them:
        whole = MARKED.search(completion) or not WORDS.search(text)
        last = given if whole else given[-len(wanted) :]
        right = pairs_up(wanted, last, lambda a, b: a is not None and same(a, b, gold.tolerance))
        return Verdict("correct" if right else "wrong", shown)
    # several numbers joined by `or`: right only if all of them are
    correct = all(
        any(same(one, number, gold.tolerance) for one in wanted if one) for number in given
    )
    return Verdict("correct" if correct else "wrong", shown)


def canonical_completion(answer: str) -> str:
    """Return a completion that gives exactly this gold."""
    gold = read_gold(answer)
    return "; ".join(gold.answers) if gold.all_of_them else gold.answers[0]


@lru_cache(maxsize=1024)
def number_in_gold(answer: str) -> Found | None:
    """Return the gold's number and unit; it is cached, since the completions of a group share
    it."""
    text = answer_part(typed(answer))
    found = last_number(text)
    if not found:
        return None
    [number] = found[-1:]
    unit = unit_behind(text, number)
    if unit is None and TERM.match(text, number.end()) and not number["percent"]:
        return None
    return value_of(number), unit


def find_number(text: str) -> re.Match[str] | None:
    """Return the number that a text ends on."""
    return next(iter(last_number(answer_part(typed(text)))[-1:]), None)


def answer_part(text: str) -> str:
    """Return what follows the text's last `####`, up to its first number, else its last box if it
    has a number, else the text; without units in brackets."""
    if "####" in text:
        after = without_units(text[text.rindex("####") + 4 :]).lstrip(": ")
        first = NUMBER.search(after)
        return "" if first is None else after[: first.end() + BEHIND].partition("\n")[0]
    boxed = without_units(last_boxed(text) or "")
    return boxed if NUMBER.search(boxed) else without_units(text)


def without_units(text: str) -> str:
    """Return the text without words in brackets behind a number: `9 (apples)`."""
    return UNIT.sub("", text) if "(" in text else text


def all_numbers(text: str) -> list[re.Match[str]]:
    """Return the last numbers of a text."""
    return list(NUMBER.finditer(text))[-MAX_NUMBERS:]


def last_number(text: str) -> list[re.Match[str]]:
    """Return the last number of a text, with those before it that `or` joins to it."""
    found = list(NUMBER.finditer(text))
    start = len(found) - 1
    while start > 0 and HEDGE.fullmatch(text, found[start - 1].end(), found[start].start()):
        start -= 1
    return found[max(start, 0) :]


def is_part(text: str, number: re.Match[str]) -> bool:
    """Whether a number is only a part of an expression."""
    ahead = PART_AHEAD.match(text, number.end())
    before = PART_BEFORE.search(text[max(number.start() - 8, 0) : number.start()])
    return bool(ahead and not number["percent"]) or before is not None


def unit_behind(text: str, number: re.Match[str]) -> Unit | None:
    """Return the known unit behind a number, or None."""
    behind = text[number.end() : number.end() + BEHIND]
    if not behind.strip():
        return None
    for end in (r"\n|[.,;]\s|[.,;]?$|\$", r"\s(?=\w)|$"):  # the phrase, else the first word
        phrase = re.split(end, behind.lstrip(), maxsplit=1)[0]
        gap = behind[: len(behind) - len(behind.lstrip())]
        if phrase not in ("", "in") and (unit := units.split(f"1{gap}{phrase}")[1]):
            return unit
    return None


def same(gold: Found, given: Found, tolerance: numbers.Tolerance) -> bool:
    """Whether two numbers are the same quantity."""
    scale = units.conversion(gold[1], given[1])
    if scale is None:
        return False
    value, percent = given[0]
    if scale != 1:
        value = numbers.scaled(value, scale)
    return numbers.same(gold[0], (value, percent), tolerance)
