r"""`choice`: a multiple-choice answer has the same letters as the gold, one or several, in any
order (`AC`, `A, C`, `A and C`).

Letters are searched for in the clearest place first: in a box or tag, after the last "answer" (or
its equivalent in another language), at the start, and finally as the last isolated capital. Several
letters count only in the first two places, after `both`, or before `are correct`. Not supported:
answers given as the text of an option instead of its letter."""

import re

from tasks.grading.answers.marked import EAST, marked_answers
from tasks.grading.verdict import Verdict

ANSWERS = True

LETTER = r"(?<![\w'])[*_(\[]{0,4}(?:\\text\{ ?)?\(?([A-Z])(?![\w'])"
WORDS = (
    "answer|choice|option|antwort|respuesta|réponse|resposta|risposta|答案|故选|应选|ответ|回答|정답"
    "|答え"
)
SAID = re.compile(rf"(?:(?i:{WORDS}))[^\n]{{0,50}}?{LETTER}")
MENTION = re.compile(r"(?i:option|choice)s?[\s*_(\[{]*(?:\\text\{ ?)?\(?")
RIGHT = re.compile(r"[*_)\].}]{0,4}\s+is\s+(?!not\b)(?:\w+\s+)?(?:correct|right|best|true)\b")
IS_IT = re.compile(
    rf"{LETTER}[*_)\].}}]{{0,4}}\s+is\s+(?:therefore\s+|thus\s+)?the\s+"
    r"(?:(?:only|correct|right|best)\s+)*(?:answer|choice|option)\b"
)
SAID_SMALL = re.compile(rf"(?i:{WORDS})\s*(?:is|:)\s*[*(]{{0,3}}([a-j])[*).\s]*$")
OR = r"[*_)\].]{0,4}\s*,?\s*(?:\bor\b|/|或者?|oder|ou|или)\s*[*_(\[]{0,4}"
HEDGE = re.compile(rf"{OR}[A-J](?![\w'])")
HEDGED = re.compile(rf"(?<![\w'])[A-J]{OR}$")
DENIED = re.compile(
    r"(?i)\b(?:not|neither|nor|never|none of|(?:any|every)thing but|any but|all but|except"
    r"|other than|instead of|rather than|(?:option|choice|answer) but"
    r"|(?:wrong|incorrect|false)\s+(?:option|choice|answer))\b|n['’]t\b|不是|不选|并非"
    r"|\b(?:(?:eliminat|discard|reject)(?:e|es|ed|ing|s)?|rul(?:e|es|ed|ing)\s+out)"
    r"\s+(?:(?:option|choice|answer)s?\s+)?[*_(\[]*$"
)
CLAUSE = re.compile(r"[.!?;,]\s|(?<![\w'])[A-J](?![\w'])")  # limits of a denial
NO = (
    r"(?:not|never|wrong|incorrect|false|invalid|impossible|unlikely|out|ruled\s+out|eliminated"
    r"|discarded|rejected)\b"
)
REJECTED = re.compile(
    r"(?:[*_()\[\].,]{0,4}\s*(?:and|or|,)\s*[*_(\[]{0,4}[A-J](?![\w']))*[*_)\].}]{0,4}\s+"
    r"(?:(?:(?:can|could|must|would|will|has\s+to)\s+)?(?:is|are|was|were|be|seems?|looks?)\s+"
    rf"(?:both\s+|all\s+|also\s+|the\s+|an?\s+|\w+ly\s+)?{NO}"
    r"|(?:is|are|was|were|does|do|did|ca|could|wo|would)n['’]t\b"
    r"|(?:cannot|(?:can|could|does|do|did|will|would)\s+not)\b)"
)
OPTION = re.compile(r"(?<![\w'.])[*_(\[]{0,4}([A-J])[*_]{0,2}[).:\]][*_]{0,2}(?!\s+is\b)\s*(?=\S)")
OPTIONS = re.compile(r"(?i)(?:answer )?(?:choice|option)s")
BESIDE_EAST = re.compile(rf"(?<=[{EAST}])(?=[A-J])|(?<=[A-J])(?=[{EAST}])")
STARTS = re.compile(rf"\s*{LETTER}(?:[.,:)*\n]|\s*$)")
ALONE = re.compile(rf"{LETTER}(?=[.,:;)\]*\s!?]|$)")
WORD = re.compile(r" (?!is\b|because\b)[a-z]")  # after an A or an I that is not an option
ONLY = re.compile(r"[\W_]*(?:\\?(?:text|mathrm|textbf)\W*)?([A-Za-z])[\W_]*")
LABEL = r"(?![A-J][)\]][*_]{0,2}\s+(?!and)[A-J](?![)\]]))"  # not the D of `(D) A and C`
LABELLED = re.compile(r"[\W_]*(?:\\?(?:text|mathrm|textbf)\W*)?([A-J])[).:\]][*_]{0,2}\s")
SEVERAL = re.compile(
    rf"(?i)[\W_]*(?:\\?(?:text|mathrm|textbf)\W*)?(?P<letters>{LABEL}[A-J]"
    r"(?:[\s,;&、和()]|and|\\text|[{}])*(?:(?:[\s,;&、和()]|and|\\text|[{}])*[A-J])+)[\W_]*"
)
LETTERS = (
    rf"(?P<letters>{LABEL}[A-J]"
    r"(?:[*_()\[\]]{0,4}(?:,? and |[,&、和 ]{1,3})?[*_()\[\]]{0,4}[A-J]){1,9})"
)
SAID_SEVERAL = re.compile(
    rf"(?:(?i:{WORDS}))(?:[^\n]{{0,20}}?)(?:(?i:is|are)|[:：是为]|(?<=选))\s*(?:both\s+)?"
    rf"[*_(\[]{{0,4}}{LETTERS}(?![\w'])(?!\s*,?\s*or\b)"
)
SAID_PLURAL = re.compile(
    rf"(?P<named>(?i:options|choices|answers)\s+)?(?<![\w'])[*_(\[]{{0,4}}{LETTERS}"
    r"(?:(?(named)[\W_]*$|(?!))|[\W_]+are\s+(?:both\s+|all\s+)?(?:correct|right|true)\b)"
)
BOTH = re.compile(rf"(?i:both)\s+(?:(?:option|choice|answer)s\s+)?[*_(\[]{{0,4}}{LETTERS}(?![\w'])")


def verify(completion: str, answer: str) -> Verdict:
    """Return `correct`, `wrong`, or `unparsed` if no letter is found. A gold without letters is an
    `error`."""
    gold = letters_of(answer[:100])
    if gold is None:
        return Verdict("error", f"the gold answer {answer[:80]!r} is not one letter, nor several")
    given = find_letters(completion)
    if given is None:
        return Verdict("unparsed", "")
    return Verdict("correct" if set(given) == set(gold) else "wrong", given)


def letters_of(text: str) -> str | None:
    """Return the letters, in capitals, of a text that only lists letters of options; else None."""
    if only := ONLY.fullmatch(text):
        return only[1].upper()
    several = SEVERAL.fullmatch(text)
    return capitals(several["letters"]) if several else None


def capitals(text: str) -> str | None:
    """Return the letters of a list of capitals; None if a letter repeats, as in a word."""
    letters = re.sub(r"and|\\text|[^a-jA-J]", "", text).upper()
    return letters if len(set(letters)) == len(letters) else None


def find_letters(text: str) -> str | None:
    """Return the letters that the text states as its answer, or None."""
    text = BESIDE_EAST.sub(" ", text)
    marked = ", ".join(marked_answers(text))
    for place in (marked, text.strip()):
        if len(place) < 100 and (found := letters_of(place)):
            return found
    if labelled := LABELLED.match(marked):
        return labelled[1]
    said = list(SAID_SEVERAL.finditer(text)) or list(SAID_PLURAL.finditer(text))
    if said and (found := capitals(said[-1]["letters"])):
        return found
    return find_letter(text)


def find_letter(text: str) -> str | None:
    """Return the letter that running text states as its answer, or the letters that it joins with
    `both`; None if it states none."""
    listed = options(text)
    said, is_it = (
        [
            found
            for found in pattern.finditer(text)
            if not denied(text, found)
            and not (found.start(1) in listed and OPTIONS.match(text, found.start()))
        ]
        for pattern in (SAID, IS_IT)
    )
    stated = [found for found in said if not is_mentioned(text, found)]
    if is_it and (not stated or stated[-1].start() < is_it[-1].end()):
        return with_hedge(text, is_it[-1])
    if stated or said:
        return with_hedge(text, (stated or said)[-1])
    if small := SAID_SMALL.search(text[-100:]):
        return small[1].upper()
    start = STARTS.match(text)
    if start and start.start(1) not in listed and not denied(text, start):
        return with_hedge(text, start)
    alone = [
        found
        for found in ALONE.finditer(text)
        if not (found[1] in "AI" and WORD.match(text, found.end()))
        and not denied(text, found)
        and (found.start(1) not in listed or RIGHT.match(text, found.end(1)))
    ]
    if not alone:
        return None
    both = [found for found in BOTH.finditer(text) if found.end() >= alone[-1].end(1)]
    return capitals(both[0]["letters"]) if both else with_hedge(text, alone[-1])


def options(text: str) -> set[int]:
    """Return the positions of the letters in a list of options: `A) 3 B) 4`."""
    found: list[int] = []
    for option in OPTION.finditer(text):
        if option[1] == "ABCDEFGHIJ"[len(found) : len(found) + 1]:
            found.append(option.start(1))
    return set(found) if len(found) > 1 else set()


def is_mentioned(text: str, found: re.Match[str]) -> bool:
    """Return whether a letter is only mentioned (`option A`), not chosen (`option A is right`)."""
    before = MENTION.fullmatch(text, found.start(), found.start(1))
    return before is not None and not RIGHT.match(text, found.end(1))


def denied(text: str, found: re.Match[str]) -> bool:
    """Return whether a letter is ruled out as an answer: `not A`, `A is wrong`."""
    start = min(found.start(), max(found.start(1) - 20, 0))
    clause = CLAUSE.split(text[start : found.start(1)])[-1]
    return DENIED.search(clause) is not None or REJECTED.match(text, found.end(1)) is not None


def with_hedge(text: str, found: re.Match[str]) -> str:
    """Return the letter. If the text hedges (`A or B`), append a `?`, which makes it wrong."""
    hedge = HEDGE.match(text, found.end(1)) or HEDGED.search(
        text[max(found.start(1) - 20, 0) : found.start(1)]
    )
    return found[1] + ("?" if hedge else "")
