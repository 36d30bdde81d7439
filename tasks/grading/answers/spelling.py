r"""Normalise the spelling of an answer: delimiters, boxes, emphasis and the alternatives that LaTeX
allows. This module also lists the names of a result (no solution, all real numbers)."""

import re
from functools import lru_cache

from tasks.grading.answers import numbers
from tasks.grading.answers.units import TEXT

GROUPED = re.compile(r"[-+]?\d{1,3}(?: \d{3})+")  # 10 000
WRAPPED = re.compile(
    r"\\(?:boxed|fbox)\s*\{(.*)\}|\$\$?(.+?)\$?\$|\\\((.+)\\\)|\\\[(.+)\\\]", re.DOTALL
)
TYPESETTING = [
    (re.compile(pattern), by)
    for pattern, by in (
        (r"\\(?:left|right|bigg?|Bigg?|displaystyle|textstyle|limits)(?![a-zA-Z])\.?", ""),
        (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
        (r"\\frac\s*(\\[a-zA-Z]+|\d)\s*(\\[a-zA-Z]+|\d)", r"\\frac{\1}{\2}"),
        (r"(?<=\d)(?:\\,|\{ \}|~)(?=\d{3}(?!\d))", ""),
        (r"\*\*", "^"),
        (r"\^\s*\{\s*([-+]?)\s*(\d+)\s*\}", r"^{\1\2}"),
        (r"\\(overline|bar|dot)\s*(\d)(?!\d)", r"\\\1{\2}"),
        (r"\\(?:mathbf|Bbb|mathbb)\s*\{?\s*R(?![a-zA-Z])\s*\}?", r"\\mathbb{R}"),
        (r"\\(?:color|textcolor)\s*\{[^{}]*\}", ""),
        (r"\\(?:bf|it|rm|boldmath)(?![a-zA-Z])", ""),
        (r"\\lbrace(?![a-zA-Z])", r"\\{"),
        (r"\\rbrace(?![a-zA-Z])", r"\\}"),
        (r"\\[hv]?phantom\s*(?:\{[^{}]*\})?|^\s*\\approx", ""),
        (r"\\(?:leq|leqslant|le)(?![a-zA-Z])|<=|≤|⩽", r" \\le "),
        (r"\\(?:geq|geqslant|ge)(?![a-zA-Z])|>=|≥|⩾", r" \\ge "),
        (r"\\lt(?![a-zA-Z])", "<"),
        (r"\\gt(?![a-zA-Z])", ">"),
        (r"\\(?:neq|ne)(?![a-zA-Z])|!=|≠", r" \\ne "),
        (r"(?<=\d),\\!\s*(?=\d{3})", ""),
        (r"(?<!\\)\\[!,;: ]|\\(?:q?quad|nobreakspace|thinspace)(?![a-zA-Z])|~|\u00a0", " "),
        (r"\\(?:mathbf|boldsymbol|bm|mathbin|textbf|underline|mathit)\s*\{([^{}]*)\}", r"\1"),
        (r"\\text\s*\{\s*(?:percent|pct)\s*\}|(?<=[\d}]) ?(?:percent|pct)\b", r"\\%"),
        (r"π|(?<![\\a-zA-Z])pi(?![a-zA-Z])", r"\\pi "),
        (r"∞|(?<![\\a-zA-Z])(?:infinity|inf|oo)(?![a-zA-Z])", r"\\infty "),
        (r"\\?sqrt\s*\(([^()]*)\)|(?<![\\a-zA-Z])sqrt\s*\{([^{}]*)\}", r"\\sqrt{\1\2}"),
        (r"√\s*(?:\(([^()]*)\)|(\d+|[a-zA-Z]))", r"\\sqrt{\1\2}"),
        (r"∛\s*(?:\(([^()]*)\)|(\d+|[a-zA-Z]))", r"\\sqrt[3]{\1\2}"),
        (r"∜\s*(?:\(([^()]*)\)|(\d+|[a-zA-Z]))", r"\\sqrt[4]{\1\2}"),
        (  # plain syntax: 5*sin(x)
            r"(?<![\\a-zA-Z])((?:arc)?(?:sin|cos|tan)h?|cot|sec|csc|ln|log|exp)(?=\s*\()",
            r"\\\1",
        ),
        (r"\\text\s*\{\s*\(([A-Z])\)\s*\}", r"\\text{\1}"),
        (r"∪", r"\\cup "),
        (r"∈", r"\\in "),
        (r"±", r"\\pm "),
        (r"(?<=\^)\s*(-?\d+)(?![\d}])", r"{\1}"),
        (r"[ \t\n\r]+", " "),
        # 3/2 x, where LaTeX's parser would divide by 2x
        (
            r"(?<![\w./}])(\d+) ?/ ?(\d+) (?=(?:[a-z]|\\(?:pi|sqrt|theta))(?![a-zA-Z]))",
            r"\\frac{\1}{\2} ",
        ),
    )
]
NUMBERED = re.compile(r"\\(?:text|mathrm|mbox)\s*\{\s*([-+$\d.][^{}\\]*?)\s*\}")  # 5.4 cents
# words before the answer, in a box
LEAD = re.compile(r"\\text\s*\{[^{}]*?(?:\b(?:is|are|equals)|[:=])\s*\}\s*(?=.)")
NAMES = {
    "empty": {
        r"\emptyset", r"\varnothing", "∅", r"\{\}", "{}", "nosolution", "nosolutions",
        "norealsolution", "norealsolutions", "nosolutionexists", "nosolutionsexist", "noanswer",
        "thereisnosolution", "therearenosolutions", "therearenorealsolutions",
        "thereisnorealsolution", "emptyset", "theemptyset", "无解", "空集", "解なし",
    },
    "reals": {
        r"\mathbb{R}", r"\mathbbR", "ℝ", r"\R", r"(-\infty,\infty)", r"(-\infty,+\infty)",
        "allrealnumbers", "allreals", "therealnumbers", "allrealnumber", "anyrealnumber",
        "realnumbers", "thesetofrealnumbers", "thesetofallrealnumbers", r"-\infty<x<\infty",
        "全体实数", "所有实数", "任意实数", "实数集",
    },
    "undefined": {"undefined", "doesnotexist", "dne", "notdefined"},
    "infinite": {"infinitelymany", "infinitelymanysolutions"},
}  # fmt: skip
MAX_DELIMITERS = 12  # around an answer
NAMED = {name: meaning for meaning, names in NAMES.items() for name in names}


@lru_cache(maxsize=4096)
def clean(text: str) -> str:
    """Return an answer without delimiters, boxes, emphasis or final punctuation, and with one
    spelling where LaTeX allows several."""
    text = numbers.typed(text.strip())
    for _ in range(MAX_DELIMITERS):
        before = text
        text = text.strip().strip("*").strip() if text.startswith("**") else text.strip()
        text = re.sub(r"(?<!\\)[.,;。，；:]+$", "", text)
        text = text.removesuffix("\\")
        if wrapped := WRAPPED.fullmatch(text):
            inner = next(group for group in wrapped.groups() if group is not None)
            if "$" not in inner.replace("\\$", "") and balanced(inner):
                text = inner
        if text == before:
            break
    text = NUMBERED.sub(r"\1", text) if NUMBERED.fullmatch(text) else LEAD.sub("", text)
    for pattern, by in TYPESETTING:
        text = pattern.sub(by, text)
    text = text.strip()
    return text.replace(" ", "") if GROUPED.fullmatch(text) else text


def balanced(text: str) -> bool:
    """Return whether the braces in a text are balanced."""
    depth = 0
    for character in text:
        depth += (character == "{") - (character == "}")
        if depth < 0:
            return False
    return depth == 0


def key(text: str) -> str:
    """Return a cleaned answer without spaces or text commands, for comparison as text."""
    text = TEXT.sub(r"\1", text).replace(r"\ ", " ")
    text = re.sub(r"(?<=\d) +(?=\d)", "_", text).replace(" ", "")  # `1 2` is not `12`
    if NAMED.get(text.casefold()):
        return text.casefold()
    return text


def meaning(text: str) -> str | None:
    r"""Return the meaning of a named result (`reals` for x \in \mathbb{R}), or None."""
    text = key(text)
    found = NAMED.get(text) or NAMED.get(text.casefold())
    if found is None and r"\in" in text:
        text = re.sub(r"^\\?\{[a-z](?:\\mid|:|\|)(.*?)\\?\}$", r"\1", text)
        found = NAMED.get(text.partition(r"\in")[2])
        return found if found in ("reals", "empty") else None
    return found
