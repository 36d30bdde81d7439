"""Find the answer in a completion, for several verifiers. Every function takes time linear in the
text."""

import re
from collections.abc import Callable
from functools import lru_cache

from tasks.grading.answers import units
from tasks.grading.answers.forms import is_denied
from tasks.grading.answers.spelling import clean

BLANK = r"(?:[\s$,;&]|\\[,;:! ]|\\q?quad)*+"
JOINED = re.compile(rf"{BLANK}(?:(?:and|or|\\text\{{\s*(?:and|or)\s*\}}){BLANK})?")
NAMED = re.compile(rf"{JOINED.pattern}(?:{BLANK}[a-zA-Z]{BLANK}={BLANK})?")  # $x=$ \boxed{1}
MAX_BOXES = 20  # searched, from the end
EAST = r"\u3040-\u30ff\u4e00-\u9fff\uac00-\ud7af\u3000-\u303f\uff00-\uffef"  # East Asian
MARK = "####"
MARKS = ("boxed", "fbox", MARK, "answer>")
BOX = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])\s*")
NESTED = re.compile(r"^\\(?:boxed|fbox)\{([^{}]*)\}$")
UNFINISHED = re.compile(rf"{BOX.pattern}|(?<!#){MARK}[\s:*]*\Z")
# a sentence that states the answer: **Answer: 17**, the correct value is 17
STATED = re.compile(
    r"(?i)(?P<doubt>\b(?:if|whether|unless|suppose|assum\w+|think|thought)\b[^.\n]{0,30})?"
    r"(?:\b(?:answer|result|solution|correction|correct (?:value|number|option|choice))|antwort"
    r"|respuesta|réponse|resposta|risposta|ответ|答案|答え|정답)"
    r"(?:\s+(?:to|for|in|of|we|i|you)\b[^.\n:=]{1,40}?)?[\s*_]*"
    r"(?:\b(?:is|are|was|(?:sh|w)ould be|must be|ist|es|est)\b|è|是|为|は|은|[:：=])[\s*_:：]*"
    r"(?:(?:actually|therefore|thus|then|now|in fact|instead|really|hence|just|simply)\b,?\s*)?"
    r"(?=(?P<value>[^\n]{1,200}))"
)
# where a stated value ends
END = re.compile(
    r"[.;](?:[\s*]|$)|[!?][\s*]+(?=\S)|。|,?\s+(?:because|since|as|so|not|which|where|that|but|hence|for|when|if)\b"
)
MAX_FORMULA = 300  # characters of a completion that is one formula
FORMULA = re.compile(
    r"[^a-zA-Z\\]*+(?:(?:\\(?:begin|end|text|mathrm|mbox|operatorname)\{[^{}\n]*\}|\\[a-zA-Z]++"
    r"|\\[^a-zA-Z]|(?:sqrt|pi|sin|cos|tan|log|ln|exp|cm|or|and)(?![a-zA-Z])"
    r"|[b-df-hj-np-tv-z]{0,2}[a-zA-Z](?![a-zA-Z]))[^a-zA-Z\\]*+)*+"
)


def after_think(text: str) -> str:
    """Return the text after the last `</think>`, or the whole text if there is none."""
    return text.rpartition("</think>")[2]


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last `\boxed{...}` or `\fbox{...}`, or the word after it if it has
    no brace (`\boxed 7`); None without a box, or if the brace is not closed."""
    opened = last_box(text)
    if opened is None:
        return None
    if not text.startswith("{", opened.end()):  # \boxed 7
        return next(iter(text[opened.end() :].split("$")[0].split()), None)
    end = box_end(text, opened)
    return text[opened.end() + 1 : end - 1] if end else None


def last_box(text: str) -> re.Match[str] | None:
    """Return the match of the last BOX of a text, or None."""
    start = max(text.rfind("\\boxed"), text.rfind("\\fbox"))
    return BOX.match(text, start) if start >= 0 else None


def box_end(text: str, opened: re.Match[str]) -> int | None:
    """Return the end of a box; None if it has no closed brace."""
    found = closing_braces(text[opened.end() :]).get(0)
    return None if found is None else opened.end() + found + 1


def gold_boxed(gold: str) -> str | None:
    r"""Return the answer in the box of a gold; None without a box. Boxes joined only by `and`,
    `or`, `,` and `x =` become a list: `1, 2` for `x = \boxed{1} or x = \boxed{2}`."""
    last = last_boxed(gold)
    boxes = contents(last_boxes(gold, NAMED)) if last is not None else []
    return ", ".join(boxes[-MAX_BOXES:]) if boxes else last


def last_boxes(text: str, joined: re.Pattern[str] = JOINED) -> str:
    """Return the end of a text, which contains its last answer: the last box, or the last several
    boxes if only text that matches `joined` separates them. The end starts after the preceding
    box; without a preceding box among the last MAX_BOXES, return the whole text."""
    start = len(text)
    closed = closing_braces(text)
    for box in list(BOX.finditer(text))[: -MAX_BOXES - 1 : -1]:
        end = closed.get(box.end())
        if end is None:
            continue
        if end < start < len(text) and not joined.fullmatch(text, end + 1, start):
            return text[end + 1 :]
        start = box.start()
    return text


@lru_cache(maxsize=8)
def closing_braces(text: str) -> dict[int, int]:
    """Return the index of each matched closing brace, by the index of its opening brace."""
    found: dict[int, int] = {}
    opened: list[int] = []
    for brace in re.finditer(r"[{}]", text):
        if brace[0] == "{":
            opened.append(brace.start())
        elif opened:
            found[opened.pop()] = brace.start()
    return found


def marked_answer(text: str) -> str:
    """Return the part of a completion that is marked as its answer: in tags, else in a box, else
    the whole completion."""
    _, opened, after = text.rpartition("<answer>")
    inside, closed, _ = after.partition("</answer>")
    boxed = last_boxed(text)
    return (inside if opened and closed else text if boxed is None else boxed).strip()


def is_formula(text: str) -> bool:
    """Return whether a completion is one formula or number, without words around it."""
    return (
        0 < len(text) <= MAX_FORMULA
        and "\n" not in text
        and (FORMULA.fullmatch(text) is not None or units.number_of(clean(text)) is not None)
        and not re.search(rf"[{EAST}]", text)
        and re.search(r"[\w\\]", text) is not None
    )


def final_answers(text: str, is_value: Callable[[str], bool] = is_formula) -> list[str] | None:
    """Return the marked answers of a completion; without a mark, an empty list. Marks are the last
    joined boxes, tag, or `####`, whichever comes last, and after one of these a sentence that
    states a value (`is_value`) as the answer. Return None if the last mark is unfinished, or if the
    text denies all its boxes."""
    if not any(mark in text for mark in MARKS):
        return []
    kept = undenied(text)
    answers, end = last_mark(kept)
    later = kept[end:]
    if answers is None or UNFINISHED.search(later) or (end and "<answer>" in later):
        return None
    if (answers or kept != text) and (stated := statement(later, is_value)):
        return [stated]
    return answers if answers or kept == text else None


def undenied(text: str) -> str:
    """Return the text without the boxes at its end that it denies: `not \\boxed{1}`."""
    while opened := last_box(text):
        start, end = opened.start(), box_end(text, opened)
        if end is None or not is_denied(text, start, end):
            break
        text = text[:start] + text[end:]
    return text


def statement(text: str, is_value: Callable[[str], bool]) -> str | None:
    """Return the last value that a text states to be the answer, or None."""
    for found in reversed(list(STATED.finditer(text))):
        value = END.split(found["value"], maxsplit=1)[0].strip(" *_!")
        if not found["doubt"] and is_value(value):
            return value
    return None


def last_mark(text: str) -> tuple[list[str] | None, int]:
    """Return the answers in the last mark of a text, and the index where they end."""
    answers: list[str] | None = []
    end = 0
    before, box = text.rpartition("</answer>")[0], last_box(text)
    opened = before.rfind("<answer>")
    if opened >= 0 and not (box and box.start() > len(before)):
        end = text.index("</answer>", opened)
        inside = text[opened + len("<answer>") : end].strip()
        answers = None if (final := final_answers(inside)) is None else final or [inside]
    elif box and (content := (last_boxed(text) or "").strip()):
        boxes = (NESTED.sub(r"\1", one) for one in contents(last_boxes(text)))
        answers = [one for one in boxes if one.strip()] or [content]
        end = box_end(text, box) or text.index(content, box.end()) + len(content)
    if (mark := text.rfind(MARK)) >= end:
        line = text[mark + len(MARK) :].lstrip(": ").partition("\n")[0]
        line = END.split(line, maxsplit=1)[0].strip()
        if line and (not answers or is_formula(line)):  # not a heading
            answers, end = [line], text.index(line, mark) + len(line)
    return answers, end


def contents(text: str) -> list[str]:
    """Return the contents of all outermost boxes of a text."""
    found = []
    place = 0
    closed = closing_braces(text)
    for box in BOX.finditer(text):
        end = closed.get(box.end())
        if end is None or box.start() < place:
            continue
        found.append(text[box.end() + 1 : end])
        place = end
    return found
