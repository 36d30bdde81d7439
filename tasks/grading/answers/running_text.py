r"""Find the formulas and numbers in running text, in the order in which math-verify searches for an
answer, and test whether a text is a single formula or a sentence."""

import re
from collections.abc import Iterator
from functools import lru_cache

from math_verify import ExprExtractionConfig, LatexExtractionConfig
from math_verify.parser import get_extraction_regexes

from tasks.grading.answers import numbers, units
from tasks.grading.answers.forms import FUNCTION_NAMES, OR, is_denied
from tasks.grading.answers.marked import EAST, gold_boxed
from tasks.grading.answers.numbers import NUMBER
from tasks.grading.answers.spelling import clean, meaning

# words that may be part of a formula or an answer
KEPT = FUNCTION_NAMES | set(units.COUNTS) | set(units.POWERS) | {
    "and", "per", "base", "mod", "arcsin", "arccos", "arctan", "sec", "csc", "cot", "sinh", "cosh",
    "tanh", "max", "min", "all", "real", "numbers", "solution", "solutions", "Rational",
}  # fmt: skip
EXTRACTION = (LatexExtractionConfig(boxed_match_priority=-1), ExprExtractionConfig())
BESIDE_EAST = re.compile(rf"(?<=[{EAST}])(?=[-\d\\$(.])|(?<=[\d)$}}])(?=[{EAST}])")
BETWEEN = rf"(?:\s*[^\W\d_]{{1,15}}(?=\s))?[^\w\s]?(?:{OR.pattern}|\s+[oó](?![^\W_])\s*)[^\w\s]?"
HEDGED = re.compile(NUMBER.pattern + BETWEEN + "$")
HEDGE = re.compile(BETWEEN + NUMBER.pattern)
MAX_MATCHES = 5
MAX_TEXT = 8000  # characters at the end of a text that are searched for formulas


def formulas(text: str) -> Iterator[str]:
    """Yield the formulas and numbers in running text, likeliest first: by math-verify's pattern
    priority, then last to first. Those that the text denies are skipped."""
    text = BESIDE_EAST.sub(" ", numbers.typed(text[-MAX_TEXT:]))
    by_priority: dict[int, list[re.Match[str]]] = {}
    for patterns, _ in get_extraction_regexes(EXTRACTION):
        for pattern, priority in patterns:
            by_priority.setdefault(priority, []).extend(pattern.finditer(text))
    for _, matches in sorted(by_priority.items()):
        matches.sort(key=lambda match: (-match.end(), match.start()))
        for match in matches[:MAX_MATCHES]:
            formula = formula_of(match)
            if formula and not is_denied(text, start_of(match), match.end()):
                before = HEDGED.search(text[max(match.start() - 60, 0) : match.start()])
                after = HEDGE.match(text, match.end())
                yield (before[0] if before else "") + " " + formula + (after[0] if after else "")


def start_of(match: re.Match[str]) -> int:
    """Return where the formula starts in a match of one of math-verify's patterns, which may begin
    with words such as `the answer is`."""
    return min(match.start(name) for name, value in match.groupdict().items() if value)


def formula_of(match: re.Match[str]) -> str:
    """Return the formula in a match of one of math-verify's patterns, without words before it."""
    groups = match.groupdict()
    latex = [value for name, value in groups.items() if "latex" in name and value]
    if latex:
        return ", ".join(latex) + (r"\%" if groups.get("first_percent") else "")
    if groups.get("expr"):
        return groups["expr"].strip()
    number = "".join(
        value for name, value in groups.items() if name[:7] in ("integer", "decimal") and value
    )
    return number + ("%" if groups.get("percent") else "")


# letters next to an operator are variables: abc + def
TERM = re.compile(r"[a-zA-Z]+(?:\s*[+*/^_]\s*| - )\w+|[+*/^_]\s*[a-zA-Z]+|\d[a-zA-Z]+")


def outside_braces(text: str) -> str:
    """Return the text outside braces; braces around the whole text do not count."""
    depth, found = 0, []
    for piece in re.split(r"([{}])", re.sub(r"^\s*\{(.*)\}\s*$", r"\1", text, flags=re.DOTALL)):
        if piece in "{}":
            depth = depth + 1 if piece == "{" else max(depth - 1, 0)
        elif depth == 0:
            found.append(piece)
    return " ".join(found)


def is_prose(text: str) -> bool:
    """Return whether a marked text is a sentence around the answer: it has two or more words that
    are neither units nor mathematics."""
    if meaning(clean(text)) is not None:
        return False  # no solution, the empty set
    bare = re.sub(r"\\[a-zA-Z]+|(?<!\\)\$[^$]*\$", " ", outside_braces(text))
    bare = TERM.sub(" ", bare)
    words = re.findall(r"[a-zA-Z]{3,}", bare)
    return sum(units.known(word) is None and word.lower() not in KEPT for word in words) > 1


@lru_cache(maxsize=4096)
def of_gold(gold: str) -> str:
    """Return a gold's answer: its boxes, the likeliest formula if it has `$`, or the whole gold."""
    boxed = gold_boxed(gold)
    if boxed is not None:
        return clean(boxed)
    cleaned = clean(gold)
    if "$" in cleaned and len(cleaned) > len(cleaned.strip("$")):
        return cleaned
    if re.search(r"(?<!\\)\$[^$]+(?<!\\)\$", cleaned):
        return clean(next(formulas(gold), cleaned))
    return cleaned
