r"""`choice`: a multiple-choice answer has the same letters as the gold, one or several, in any
order (`AC`, `A, C`, `A and C`).

Letters are searched for in the clearest place first: in a box or tag (`marked.final_answers`),
after the last "answer" (or its equivalent in another language), at the start, and finally as the
last isolated capitals, joined by `and` or commas. A later correction (`No, A`) counts, and a second
letter that is right as well (`A is also right`) makes the answer wrong. Not supported:
answers given as the text of an option instead of its letter."""

import re

from tasks.grading.answers.forms import IS_WRONG
from tasks.grading.answers.marked import EAST, final_answers
from tasks.grading.answers.units import TEXT
from tasks.grading.verdict import Verdict

ANSWERS = True

LETTER = r"(?<![\w'])[*_(\[]{0,4}([A-Z])(?![\w'])"
WORDS = (
    "answer|choice|option|antwort|respuesta|réponse|resposta|risposta|答案|故选|应选|ответ|回答|정답"
    "|答え"
)
SAID = re.compile(rf"(?:(?i:{WORDS}))[^\n]{{0,50}}?{LETTER}")
MENTION = re.compile(r"(?i:option|choice)s?[\s*_(\[{]*")
RIGHT = re.compile(r"[*_)\].}]{0,4}\s+is\s+(?!not\b)(?:\w+\s+)?(?:correct|right|best|true)\b")
IS_IT = re.compile(
    rf"{LETTER}[*_)\].}}]{{0,4}}\s+is\s+(?:therefore\s+|thus\s+)?the\s+"
    r"(?:(?:only|correct|right|best)\s+)*(?:answer|choice|option)\b"
)
SAID_SMALL = re.compile(
    rf"(?i:{WORDS})\s*(?:is|:)[*_(\s]*([a-j])(?:[*_]*[).,:;]*[*_]*(?:\s*$|\n)|[*_]*[).,:;]+[*_]*\s"
    r"|\s+(?:because|since)\b)"
)
OR = (
    r"[*_)\].]{0,4}\s*[,(]?\s*(?:\bor\b|/|或者?|oder|ou|или)\s*(?:(?:maybe|perhaps|even)\s+)?"
    r"[*_(\[]{0,4}"
)
HEDGE = re.compile(rf"{OR}[A-J](?![\w'])")
HEDGED = re.compile(rf"(?<![\w'])[A-J]{OR}$")
DENIED = re.compile(
    r"(?i)\b(?:not|neither|nor|never|none of|(?:any|every)thing but|any but|all but|except"
    r"|other than|instead of|rather than|(?:option|choice|answer) but"
    r"|(?:wrong|incorrect|false)\s+(?:option|choice|answer))\b|n['’]t\b|不是|不选|并非"
    r"|\b(?:(?:eliminat|discard|reject)(?:e|es|ed|ing|s)?|rul(?:e|es|ed|ing)\s+out)"
    r"\s+(?:(?:option|choice|answer)s?\s+)?[*_(\[]*$"
)
# a letter that replaces the one before: No, A. Wait, it is A
CORRECTED = re.compile(
    r"(?i:\b(?:no|wait|sorry|actually|correction|oops|hmm+|rather|second thought|reflection"
    r"|scratch that|i mean|mistake)\b)"
    rf"[^\n]{{0,40}}?{LETTER}(?=[*_)\]]*(?:\s*$|[.,;!?\n]|\s+is\s+(?:the|right|correct)\b))"
)
ALSO = re.compile(  # another letter that is right as well
    rf"\b(?:also(?:\s+be)?|so\s+is)\s+{LETTER}|(?<![\w'])([A-HJ])[*_)\]]*\s+(?:\w+\s+){{0,2}}?"
    r"(?:(?:too|as\s+well)\b(?!\s+\w)|(?:also|equally)\s+(?:be\s+)?(?:right|correct|true|possible|valid"
    r"|plausible|fine|works?|fits?|an?|the)\b)"
)
CLAUSE = re.compile(r"[.!?;,]\s|(?<![\w'])[A-J](?![\w'])")  # limits of a denial
REJECTED = re.compile(
    rf"(?:[*_()\[\].,]{{0,4}}\s*(?:and|or|,)\s*[*_(\[]{{0,4}}[A-J](?![\w']))*[*_)\].}}]{{0,4}}{IS_WRONG}"
)
OPTION = re.compile(r"(?<![\w'.])[*_(\[]{0,4}([A-J])[*_]{0,2}[).:\]][*_]{0,2}(?!\s+is\b)\s*(?=\S)")
OPTIONS = re.compile(r"(?i)(?:answer )?(?:choice|option)s")
BESIDE_EAST = re.compile(rf"(?<=[{EAST}])(?=[A-J])|(?<=[A-J])(?=[{EAST}])")
STARTS = re.compile(rf"\s*{LETTER}(?:[.,:)*\n]|\s*$)")
ALONE = re.compile(rf"{LETTER}(?=[.,:;)\]*\s!?]|$)")
WORD = re.compile(r" (?!is\b|because\b)[a-z]")  # after an A or an I that is not an option
ONLY = re.compile(r"[\W_]*([A-Za-z])[\W_]*")
LABEL = r"(?![A-J][)\]][*_]{0,2}\s+(?!and)[A-J](?![)\]]))"  # not the D of `(D) A and C`
LABELLED = re.compile(r"[\W_]*(?:([A-J])[*_]{0,2}[).:\]*_]+|([a-j])[)\]]+)\\?\s")
SEVERAL = re.compile(
    rf"(?i)[\W_]*(?P<letters>{LABEL}[A-J](?:(?:[\s,;&、和(){{}}]|and)*[A-J])+)[\W_]*"
)
LETTERS = (
    rf"(?P<letters>{LABEL}[A-J]"
    r"(?:[*_()\[\]]{0,4}(?:,? and |[,&、和 ]{1,3})?[*_()\[\]]{0,4}[A-J]){1,9})"
)
LIST = re.compile(  # not with the B of `A, B is wrong`, nor the I of `A and I think`
    rf"(?<![\w'])[*_(\[]{{0,4}}{LETTERS}(?![\w'])(?!{IS_WRONG})(?<!\bI(?= [a-z]))"
)
JOINED = re.compile(  # AC, if it is said to be the answer
    rf"((?i:{WORDS})(?:s|[^\n]{{0,20}}?(?:is|are|[:：是为]|(?<=选)))\s*[*_(\[]{{0,4}}|(?<![\w'])"
    r"(?=[A-J]{2,9}\W+are (?:\w+ )?(?:correct|right|true)\b))([A-J]{2,9})(?![\w'])"
)


def verify(completion: str, answer: str) -> Verdict:
    """Return `correct`, `wrong`, or `unparsed` if no letter is found. A gold without letters is an
    `error`."""
    gold = letters_of(answer[:100]) or label_of(answer)
    if gold is None:
        return Verdict("error", f"the gold answer {answer[:80]!r} is not one letter, nor several")
    given = find_letters(completion)
    if given is None:
        return Verdict("unparsed", "")
    return Verdict("correct" if set(given) == set(gold) else "wrong", given)


def letters_of(text: str) -> str | None:
    """Return the letters, in capitals, of a text that only lists letters of options; else None."""
    text = TEXT.sub(r"\1", text)
    if only := ONLY.fullmatch(text):
        return only[1].upper()
    several = SEVERAL.fullmatch(text)
    return capitals(several["letters"]) if several else None


def label_of(text: str) -> str | None:
    """Return the letter before the text of an option (`(B) Paris`), in capitals, or None."""
    found = LABELLED.match(TEXT.sub(r"\1", text))
    return (found[1] or found[2]).upper() if found else None


def capitals(text: str) -> str | None:
    """Return the letters of a list of capitals; None if a letter repeats, as in a word."""
    letters = re.sub(r"and|[^a-jA-J]", "", text).upper()
    return letters if len(set(letters)) == len(letters) else None


def canonical_completion(answer: str) -> str:
    """Return the gold's letters, or the gold if it has none."""
    return letters_of(answer) or label_of(answer) or answer


def find_letters(text: str) -> str | None:
    """Return the letters that the text states as its answer, or None."""
    text = TEXT.sub(r"\1", BESIDE_EAST.sub(" ", text))
    text = JOINED.sub(lambda found: found[1] + ", ".join(found[2]), text)  # AC
    answers = final_answers(text, lambda value: bool(letters_of(value) or label_of(value)))
    if answers is None:
        return None
    marked = ", ".join(answers)
    for place in (marked, text.strip()):
        if len(place) < 100 and (found := letters_of(place)):
            return found
    return label_of(marked) or find_letter(text)


def find_letter(text: str) -> str | None:
    """Return the letter that running text states as its answer, or the letters that it joins with
    `both`; None if it states none."""
    listed = options(text)
    said, is_it = (
        [
            match
            for match in pattern.finditer(text)
            if not denied(text, match)
            and not (match.start(1) in listed and OPTIONS.match(text, match.start()))
        ]
        for pattern in (SAID, IS_IT)
    )
    stated = [match for match in said if not is_mentioned(text, match)]
    if is_it and (not stated or stated[-1].start() < is_it[-1].end()):
        return with_hedge(text, is_it[-1].start(1))
    if stated or said:
        return with_hedge(text, (stated or said)[-1].start(1))
    if small := list(SAID_SMALL.finditer(text)):
        return small[-1][1].upper()
    start = STARTS.match(text)
    if start and start.start(1) not in listed and not denied(text, start):
        return with_hedge(text, start.start(1))
    alone = [
        match
        for match in ALONE.finditer(text)
        if not (match[1] in "AI" and WORD.match(text, match.end()))
        and not denied(text, match)
        and (match.start(1) not in listed or RIGHT.match(text, match.end(1)))
    ]
    if not alone:
        return None
    lists = [one for one in LIST.finditer(text) if listed_by(one) and one.end() >= alone[-1].end(1)]
    return with_hedge(text, (lists or alone[-1:])[0].start(1))


def options(text: str) -> set[int]:
    """Return the positions of the letters in a list of options: `A) 3 B) 4`."""
    found: list[int] = []
    for option in OPTION.finditer(text):
        if option[1] == "ABCDEFGHIJ"[len(found) : len(found) + 1]:
            found.append(option.start(1))
    return set(found) if len(found) > 1 else set()


def is_mentioned(text: str, match: re.Match[str]) -> bool:
    """Return whether a letter is only mentioned (`option A`), not chosen (`option A is right`)."""
    before = MENTION.fullmatch(text, match.start(), match.start(1))
    return before is not None and not RIGHT.match(text, match.end(1))


def denied(text: str, match: re.Match[str]) -> bool:
    """Return whether a letter is ruled out as an answer: `not A`, `A is wrong`."""
    start = min(match.start(), max(match.start(1) - 20, 0))
    clause = CLAUSE.split(text[start : match.start(1)])[-1]
    return DENIED.search(clause) is not None or is_rejected(text, match)


def listed_by(match: re.Match[str]) -> str | None:
    """Return the letters of a match of LIST; None for a word, and for `A and C, B is right`."""
    return None if re.search("and.*,", match[1]) else capitals(match[1])


def with_hedge(text: str, start: int) -> str:
    """Return the letter and those that are listed after it, or the last one that the text then
    corrects it to. If the text hedges (`A or B`, `A is also right`), append a `?`, which makes it
    wrong."""
    later = [one for one in CORRECTED.finditer(text, start + 1) if not denied(text, one)]
    start = later[-1].start(1) if later else start
    several = LIST.match(text, start)
    letters = several and listed_by(several)
    end = several.end() if several and letters else start + 1
    letters = letters or text[start]
    others = (one[one.lastindex or 0] for one in ALSO.finditer(text) if not is_rejected(text, one))
    hedge = (
        HEDGE.match(text, end)
        or HEDGED.search(text[max(start - 20, 0) : start])
        or not set(letters).issuperset(others)
    )
    return letters + ("?" if hedge else "")


def is_rejected(text: str, match: re.Match[str]) -> bool:
    """Return whether a letter is called wrong: `A is wrong`."""
    return REJECTED.match(text, match.end(match.lastindex or 0)) is not None
