r"""`numeric`: the last number of the completion equals the gold, exactly (1,000 = 1000.0, 0.5 =
1/2) or within a tolerance.

If the completion marks its answer (by GSM8K's `####`, a box or tags), the number is taken from the
marked part, else from the last line (see `final_numbers`). A list, a range, a product or an
inequality does not count, nor does a number after `not`, in a false equation (41=42), or that is
only part of an expression (`42!`). Commas and currency signs are dropped; fractions, mixed
numbers, LaTeX fractions and powers of ten (2.1\times 10^{-8}) are parsed; 28% equals both 28 and
0.28. If gold and answer both have known units, the units count: 5 m is not 5 cm. `5 or 6` is not an
answer. Golds may list several answers or contain a tolerance (`tasks.grading.answers.golds`). Not
supported: roots, other powers; number words only with the setting `words`."""

import re
from decimal import Decimal
from functools import lru_cache

from tasks.grading.answers import numbers, units
from tasks.grading.answers.copying import NAMES
from tasks.grading.answers.forms import EITHER, OPENED, is_denied, is_doubted
from tasks.grading.answers.golds import pairs_up, read_gold
from tasks.grading.answers.marked import final_answers, is_formula, statement
from tasks.grading.answers.numbers import NUMBER, Number, plain, spelled, typed, value_of
from tasks.grading.answers.units import Unit
from tasks.grading.verdict import Verdict

ANSWERS = True
REFUSES_COPIES = True

UNIT = re.compile(  # words in brackets that are not mod or a doubt
    r"(?<=[\d%]) ?\((?!mod|or\b|wrong|incorrect|false|no\b|may)(?=[^()]{0,40}[^\W\d_])[^()]{1,40}\)"
)
HEDGE = re.compile(
    rf"(?:\s*[^\W\d_]{{1,15}})?\s*(?:,\s*)?(?:\b(?:{EITHER})\b|或者?|または|또는)\s*"
    r"(?:[a-zA-Z]\s*=\s*)?\\?[$(]?"
)
# a letter that touches the number makes it a term of an expression: 2s, 5-5c
TERM = re.compile(r"[^\W\d_]|_")
# a number in the answer that is only part of an expression: 42x, 42^2, \\sqrt{42}, 0,42
PART_AHEAD = re.compile(r"[a-zA-Z](?![^\W_])|\s?\^(?!\s*\{?\s*\\circ)|\s*(?:\(|\\[pb]?)?mod\b")
PART_BEFORE = re.compile(
    rf"(?:(?<![a-zA-Z])(?:{NAMES}|neg|lnot|not)\s*[{{(\\]*\s*|¬\s*|(?<![\d.,])0,)$"
)
# an operator or a factor that makes a number without words part of an expression: 42!, 42+, 42-x
TERM_AHEAD = re.compile(
    r"\s*(?:[!+÷×·]|/(?!\s*[^\W\d_]{2})|\*(?!\*)|-\s*[\w\\(]"
    r"|\\(?:cdot|times|pi|sqrt|div)(?![a-zA-Z]))"
)
# separators of a list: BETWEEN in a marked answer, SEPARATED in one without words, RANGE in prose
OPERATION = r"[-–—+*/·×÷^:]|\\(?:times|cdot|div|pm|cup|[lc]?dots)(?![a-zA-Z])"
BETWEEN = re.compile(
    rf"(?:(?<=[,;\s}}])[a-zA-Z]\s*=|[\s$,;(){{}}\[\]&]|\\[,;:!&{{}} \\]"
    rf"|\\(?:left|right|q?quad|text|boxed)(?![a-zA-Z])|{OPERATION}"
    rf"|(?:and|to|through|(?:[^\W\d_]{{1,15}}\s+)?(?:{EITHER})|和|至|到)(?![a-zA-Z]))*+"
)
SEPARATED = re.compile(
    rf"{HEDGE.pattern}|(?:[,;]\s+|-|\s?[–—]\s?|\s+(?:and|to)\s+)(?:[a-zA-Z]\s*=\s*)?"
)
RANGE = re.compile(rf"{HEDGE.pattern}|-|\s?[–—]\s?")
NOT = re.compile(r"\$?,? (?:and )?not \$?")  # 42, not 41
SIGN_APART = re.compile(r"(?:^|(?<=[=,({]))\s*-\s+(?=[\d.$\\])")  # the minus of `- 3`
SIGN = r"[≤≥≠]|!=|\\(?:leq?|geq?|leqslant|geqslant|lt|gt|neq?)(?![a-zA-Z])"
ABOVE = re.compile(rf"(?:(?:^|[\w)\]}}$]) *[<>]=?|{SIGN}){OPENED}")
BELOW = re.compile(rf"[\s$}}\\]*(?:[<>]=?(?=\s*[\w\\({{])|{SIGN})")
TAG = re.compile(r"</?[a-zA-Z][\w-]*>")
EQUALS = re.compile(rf"(?:^|[=\n{{])\s*\$?(?P<left>-?\d+)\s*={OPENED}")
BEHIND = 40  # characters after a number that are searched for its unit
MAX_MARKED = 2000  # characters before a number that are searched for a relation
MAX_NUMBERS = 100  # of an answer that must contain several
MARKED = re.compile(r"\\boxed|####")  # with a mark all numbers count, else the last ones
WORDS = re.compile(r"(?<!\\)\b(?!(?:and|or|to)\b)[^\W\d_]{2,}")
UNITS = re.compile(r"(?<!\\)\b(?!(?:and|or|to)\b)[^\W\d_]+\b(?!\s*=)")  # between two numbers
# 60 000
GROUPED = re.compile(r"\d(?<![\w.,/^]\d)(?<!\d \d)\d{0,2}(?:(?:\\? |~)\d{3})+(?!,?\d| \d)")
LISTED = re.compile(r"\s*\\?[\[({][^\n]{1,200},[^\n]{1,200}[\])}]\s*")  # without a mark
CLOSED = re.compile(r"\s+(?=\\\]|\$\$)")  # before the end of a formula on lines of its own
MAX_TAIL, MAX_SHORT = 5, 6  # words after the last number of a text, and on a short last line
VERBS = {"is", "are", "was", "were", "be", "has", "have", "had", "but", "that", "which", "then"}

Quantity = tuple[tuple[Number, bool], Unit | None]


def verify(
    completion: str,
    answer: str,
    *,
    relative_tolerance: float | None = None,
    words: bool = False,
) -> Verdict:
    """Return `correct`, `wrong`, or `unparsed` if the completion has no number. A gold is an
    `error` if it has no number, several, or a number that is only part of an expression."""
    if words:
        completion, answer = spelled(completion), spelled(answer)
    gold = read_gold(answer, relative_tolerance)
    golds = [number_in_gold(text) for text in gold.answers]
    if None in golds:
        unread = gold.answers[golds.index(None)]
        return Verdict("error", f"the gold answer {unread[:80]!r} is not one number")
    text, marked = answer_part(typed(completion))
    matches = list(NUMBER.finditer(text)) if marked or gold.all_of_them else final_numbers(text)
    if not matches:
        return Verdict("unparsed", "")
    text = matches[0].string
    matches = matches[-MAX_NUMBERS:] if gold.all_of_them else last_number(matches, marked)
    given = [(value_of(number), unit_behind(text, number)) for number in matches]
    shown = ", ".join(map(plain, matches))
    if gold.all_of_them:
        whole = MARKED.search(completion) or not WORDS.search(text)
        last = given if whole else given[-len(golds) :]
        right = pairs_up(golds, last, lambda a, b: a is not None and same(a, b, gold.tolerance))
    else:
        right = all(
            any(same(one, number, gold.tolerance) for one in golds if one) for number in given
        ) and not is_refused(text, matches, marked)
    return Verdict("correct" if right else "wrong", shown)


def canonical_completion(answer: str) -> str:
    """Return a completion with exactly this gold as its answer."""
    gold = read_gold(answer)
    return "; ".join(gold.answers) if gold.all_of_them else gold.answers[0]


@lru_cache(maxsize=1024)
def number_in_gold(answer: str) -> Quantity | None:
    """Return the gold's number and its unit (None without one); None if the gold is not one number.
    Cached, because the completions of a group share it."""
    text, marked = answer_part(typed(answer))
    text = SIGN_APART.sub("-", text)
    alone = marked or not WORDS.search(text)
    matches = last_number(list(NUMBER.finditer(text)), alone)
    if not matches or len({value_of(number) for number in matches}) > 1:
        return None
    if alone and is_relation(text, matches):
        return None
    number = matches[-1]
    unit = unit_behind(text, number)
    if unit is None and TERM.match(text, number.end()) and not number["percent"]:
        return None
    return value_of(number), unit


def find_number(text: str) -> re.Match[str] | None:
    """Return the match of the last number in the `answer_part` of a text, or None."""
    return next(iter(list(NUMBER.finditer(answer_part(typed(text))[0]))[-1:]), None)


def answer_part(text: str) -> tuple[str, bool]:
    """Return the answer part of a text and whether it is marked: its `final_answers` if they have a
    number, else the whole text; empty if the mark is unfinished. Units in brackets are removed."""
    answers = final_answers(text)
    marked = SIGN_APART.sub("-", without_units(joined(", ".join(answers or []))))
    if answers is None or NUMBER.search(marked):
        return marked, True
    return without_units(text), LISTED.fullmatch(text) is not None


def final_numbers(text: str) -> list[re.Match[str]]:
    """Return the numbers of the line of an unmarked text whose last number is the answer: the last
    line with a number, if it is short or ends in the number and its unit, else the value that the
    text states as the answer."""
    plain_text = CLOSED.sub(" ", TAG.sub(" ", text)) if "<" in text or "\n" in text else text
    for line in reversed(plain_text.splitlines()):
        if matches := list(NUMBER.finditer(joined(line))):
            break
    else:
        return []
    line = matches[0].string
    if len(matches) > 1 and NOT.fullmatch(line, matches[-2].end(), matches[-1].start()):
        matches.pop()
    tail = WORDS.findall(line, matches[-1].end())
    is_result = line[: matches[-1].start()].rstrip(" $\\").endswith("=")  # 10 + 32 = 42
    is_end = len(tail) <= MAX_TAIL and VERBS.isdisjoint(map(str.lower, tail))
    if is_result or is_end or (len(matches) == 1 and len(WORDS.findall(line)) <= MAX_SHORT):
        return matches
    stated = statement(text, lambda value: is_formula(value) and bool(NUMBER.search(value)))
    return list(NUMBER.finditer(stated or ""))


def joined(text: str) -> str:
    """Return the text with numbers such as `60 000` as `60000`."""
    return GROUPED.sub(lambda found: re.sub(r"\D", "", found[0]), text) if " " in text else text


def without_units(text: str) -> str:
    """Return the text without bracketed words after a number: `9 (apples)`."""
    return UNIT.sub("", text) if "(" in text else text


def last_number(matches: list[re.Match[str]], marked: bool) -> list[re.Match[str]]:
    """Return the last of the numbers of a text, with the preceding ones that form a list, a range
    or a product with it."""
    start = len(matches) - 1
    if start > 0:
        text = matches[0].string
        join = BETWEEN if marked else RANGE if WORDS.search(text) else SEPARATED
        while start > 0 and join.fullmatch(text, matches[start - 1].end(), matches[start].start()):
            start -= 1
    return matches[max(start, 0) :]


def is_refused(text: str, matches: list[re.Match[str]], marked: bool) -> bool:
    """Return whether the text takes back or limits its last numbers: `not 42`, `x < 42`, `42!`."""
    first, last = matches[0], matches[-1]
    alone = marked or not WORDS.search(text)
    return (
        is_part(text, last, alone)
        or is_denied(text, first.start(), last.end())
        or (marked and is_doubted(text))
        or (alone and is_relation(text, matches))
        or UNITS.search(text, first.end(), last.start()) is not None  # 7 km or 7 miles
    )


def is_part(text: str, number: re.Match[str], alone: bool) -> bool:
    """Return whether a number is only part of an expression, such as `42x` or `42^2`; if `alone`,
    without words around it, also `42!` or `42+`."""
    ahead = PART_AHEAD.match(text, number.end()) or (alone and TERM_AHEAD.match(text, number.end()))
    before = PART_BEFORE.search(text[max(number.start() - 12, 0) : number.start()])
    return bool(ahead and not number["percent"]) or before is not None


def is_relation(text: str, matches: list[re.Match[str]]) -> bool:
    """Return whether the numbers are in an inequality, or in a false equation such as `41 = 42`."""
    first, last = matches[0], matches[-1]
    before = TAG.sub("", text[: first.start()][-MAX_MARKED:])
    if ABOVE.search(before) or BELOW.match(TAG.sub("", text[last.end() : last.end() + BEHIND])):
        return True
    equation = EQUALS.search(before)
    if equation is None or not re.fullmatch(r"-?\d+", plain(last)):
        return False
    return not numbers.same((Decimal(equation["left"]), False), value_of(last))


def unit_behind(text: str, number: re.Match[str]) -> Unit | None:
    """Return the known unit after a number, or None."""
    behind = text[number.end() : number.end() + BEHIND]
    if not behind.strip():
        return None
    for end in (r"\n|[.,;]\s|[.,;]?$|\$", r"\s(?=\w)|$"):  # the phrase, else the first word
        phrase = re.split(end, behind.lstrip(), maxsplit=1)[0]
        gap = behind[: len(behind) - len(behind.lstrip())]
        if phrase not in ("", "in") and (unit := units.split(f"1{gap}{phrase}")[1]):
            return unit
    return None


def same(gold: Quantity, given: Quantity, tolerance: numbers.Tolerance) -> bool:
    """Return whether two numbers are the same quantity."""
    scale = units.conversion(gold[1], given[1])
    if scale is None:
        return False
    value, percent = given[0]
    if scale != 1:
        value = numbers.scaled(value, scale)
    return numbers.same(gold[0], (value, percent), tolerance)
