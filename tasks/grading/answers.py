"""Find the answer in a completion, for several verifiers. Every function takes time linear in the
text."""

import re

TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
BLANK = r"(?:[\s$,;&]|\\[,;:! ]|\\q?quad)*+"
JOINED = re.compile(rf"{BLANK}(?:(?:and|or|\\text\{{\s*(?:and|or)\s*\}}){BLANK})?")
NAMED = re.compile(rf"{JOINED.pattern}(?:{BLANK}[a-zA-Z]{BLANK}={BLANK})?")  # $x=$ \boxed{1}
MAX_BOXES = 20  # that are searched, from the end
EAST = r"\u3040-\u30ff\u4e00-\u9fff\uac00-\ud7af\u3000-\u303f\uff00-\uffef"  # characters
BOX = re.compile(r"\\(?:boxed|fbox)(?![a-zA-Z])\s*")


def after_think(text: str) -> str:
    """Return what follows the last `</think>`; all of a text without one."""
    return text.rpartition("</think>")[2]


def last_boxed(text: str) -> str | None:
    r"""Return the content of the last `\boxed{...}` or `\fbox{...}`, braces matched; None without
    one, or if it is not closed."""
    start = max(text.rfind("\\boxed"), text.rfind("\\fbox"))
    opened = BOX.match(text, start) if start >= 0 else None
    if opened is None:
        return None
    if text[opened.end() : opened.end() + 1] != "{":  # \boxed 7
        return next(iter(text[opened.end() :].split("$")[0].split()), None)
    end = closing_brace(text, opened.end())
    return None if end is None else text[opened.end() + 1 : end]


def gold_boxed(gold: str) -> str | None:
    r"""Return the answer in the box of a gold, the list of them in several that only `and`, `or`,
    `,` and `x =` join, as `1, 2` for `x = \boxed{1}` or `x = \boxed{2}`; None without a box."""
    last = last_boxed(gold)
    boxes = contents(last_boxes(gold, NAMED)) if last is not None else []
    return ", ".join(boxes[-MAX_BOXES:]) if boxes else last


def last_boxes(text: str, joined: re.Pattern[str] = JOINED) -> str:
    """Return the text from its last box on, or from the first of the last boxes where only `and` or
    `,` joins them: of several answers the last counts. A text with one box or none is returned
    whole."""
    start = len(text)
    for box in list(BOX.finditer(text))[: -MAX_BOXES - 1 : -1]:
        end = closing_brace(text, box.end()) if text[box.end() : box.end() + 1] == "{" else None
        if end is None:
            continue
        if start < len(text) and not joined.fullmatch(text, end + 1, start):
            return text[end + 1 :]
        start = box.start()
    return text


def closing_brace(text: str, start: int) -> int | None:
    """Return where the brace that opens at `start` is closed, or None."""
    depth = 0
    for brace in re.compile(r"[{}]").finditer(text, start):
        depth += 1 if brace.group() == "{" else -1
        if depth == 0:
            return brace.start()
    return None


def closing_braces(text: str) -> dict[int, int]:
    """Return where each brace of a text that is closed opens and is closed."""
    found, opened = {}, []
    for brace in re.finditer(r"[{}]", text):
        if brace[0] == "{":
            opened.append(brace.start())
        elif opened:
            found[opened.pop()] = brace.start()
    return found


def last_tagged(text: str) -> str | None:
    """Return the content of the last `<answer>...</answer>`, or None."""
    start = text.rfind("<answer>")
    found = TAGGED.match(text, start) if start >= 0 else None
    return None if found is None else found.group(1).strip()


def marked_answer(text: str) -> str:
    """Return the part of a completion that is marked as its answer: in tags, else in a box, else
    the whole completion."""
    tagged = last_tagged(text)
    boxed = last_boxed(text)
    return (tagged if tagged is not None else boxed if boxed is not None else text).strip()


MARK = "####"


def marked_answers(text: str) -> list[str]:
    """Return what a completion marks as its answer: the contents of the last boxes that belong
    together, of the last tag if it comes later, or of what follows `####`; empty without a mark."""
    tag = text.rfind("</answer>")
    box = max(text.rfind("\\boxed"), text.rfind("\\fbox"))
    if tag > box:
        inside = last_tagged(text)
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
    """Return the contents of all boxes of a text, outermost only."""
    found = []
    place = 0
    closed = closing_braces(text)
    for box in BOX.finditer(text):
        if box.start() < place or text[box.end() : box.end() + 1] != "{":
            continue
        end = closed.get(box.end())
        if end is None:
            continue
        found.append(text[box.end() + 1 : end])
        place = end
    return found
