"""Find the answer in a completion, for several verifiers. Every function takes time linear in the
text."""

import re

ANSWER_TAG = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
BLANK = r"(?:[\s$,;&]|\\[,;:! ]|\\q?quad)*+"
JOINED = re.compile(rf"{BLANK}(?:(?:and|or|\\text\{{\s*(?:and|or)\s*\}}){BLANK})?")
NAMED = re.compile(rf"{JOINED.pattern}(?:{BLANK}[a-zA-Z]{BLANK}={BLANK})?")  # $x=$ \boxed{1}
MAX_BOXES = 20  # searched, from the end
EAST = r"\u3040-\u30ff\u4e00-\u9fff\uac00-\ud7af\u3000-\u303f\uff00-\uffef"  # East Asian
MARK = "####"
BOX = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])\s*")


def after_think(text: str) -> str:
    """Return the text after the last `</think>`, or the whole text if there is none."""
    return text.rpartition("</think>")[2]


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last `\boxed{...}` or `\fbox{...}`, or the word after it if it has
    no brace (`\boxed 7`); None without a box, or if the brace is not closed."""
    start = max(text.rfind("\\boxed"), text.rfind("\\fbox"))
    opened = BOX.match(text, start) if start >= 0 else None
    if opened is None:
        return None
    if text[opened.end() : opened.end() + 1] != "{":  # \boxed 7
        return next(iter(text[opened.end() :].split("$")[0].split()), None)
    end = closing_braces(text).get(opened.end())
    return None if end is None else text[opened.end() + 1 : end]


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
        if start < len(text) and not joined.fullmatch(text, end + 1, start):
            return text[end + 1 :]
        start = box.start()
    return text


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


def last_tag(text: str) -> str | None:
    """Return the content of the last `<answer>` tag; None without one, or if it is not closed."""
    start = text.rfind("<answer>")
    found = ANSWER_TAG.match(text, start) if start >= 0 else None
    return None if found is None else found.group(1).strip()


def marked_answer(text: str) -> str:
    """Return the part of a completion that is marked as its answer: in tags, else in a box, else
    the whole completion."""
    in_tag = last_tag(text)
    boxed = last_boxed(text)
    return (in_tag if in_tag is not None else boxed if boxed is not None else text).strip()


def marked_answers(text: str) -> list[str]:
    """Return the marked answers of a completion: the contents of the last joined boxes or, if it
    comes later, of the last tag; else the text after `####`; without a mark, an empty list."""
    tag = text.rfind("</answer>")
    box = max(text.rfind("\\boxed"), text.rfind("\\fbox"))
    if tag > box:
        inside = last_tag(text)
        if inside is not None:
            return marked_answers(inside) or [inside]
    boxes = [content for content in contents(last_boxes(text)) if content.strip()]
    if boxes:
        return boxes
    unclosed = last_boxed(text)
    if unclosed is not None:
        return [unclosed]
    if MARK in text:
        after = text[text.rindex(MARK) + len(MARK) :].lstrip(": ").partition("\n")[0].strip()
        return [after] if after else []
    return []


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
