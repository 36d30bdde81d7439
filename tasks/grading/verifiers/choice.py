r"""`choice`: the letter of a multiple-choice answer is the gold letter.

The letter is searched where it is clearest first: in the last box, after the last "answer" (or its
word in another language), at the start, and finally the last capital that stands alone. Left out:
answers given as the text of an option instead of its letter, several letters."""

import re

from tasks.grading.answers import last_boxed
from tasks.grading.verdict import Verdict

LETTER = r"(?<![\w'])[*_(\[]{0,4}(?:\\text\{ ?)?\(?([A-Z])(?![\w'])"
WORDS = "answer|choice|option|antwort|respuesta|réponse|resposta|risposta|答案|ответ|回答|정답|答え"
SAID = re.compile(rf"(?:(?i:{WORDS}))[^\n]{{0,50}}?{LETTER}")
STARTS = re.compile(rf"\s*{LETTER}(?:[.,:)*\n]|\s*$)")
ALONE = re.compile(rf"{LETTER}(?=[.,:;)\]*\s!?]|$)")
WORD = re.compile(r" (?!is\b|because\b)[a-z]")  # after an A or an I that is none of the options
ONLY = re.compile(r"[\W_]*(?:\\?(?:text|mathrm|textbf)\W*)?([A-Za-z])[\W_]*")


def verify(completion: str, answer: str) -> Verdict:
    """`correct`, `wrong`, or `unparsed` when no letter is found. A gold that is no single letter is
    an error."""
    gold = ONLY.fullmatch(answer[:100])
    if gold is None:
        return Verdict("error", f"the gold answer {answer[:80]!r} is not one letter")
    given = find_letter(completion)
    if given is None:
        return Verdict("unparsed", "")
    return Verdict("correct" if given == gold[1].upper() else "wrong", given)


def find_letter(text: str) -> str | None:
    """Return the letter that the text gives as its answer, or None."""
    boxed = last_boxed(text)
    for place in (boxed, text.strip()):
        if place is not None and len(place) < 100 and (only := ONLY.fullmatch(place)):
            return only[1].upper()
    if said := SAID.findall(text):
        return str(said[-1])
    if start := STARTS.match(text):
        return start[1]
    alone = [
        found[1]
        for found in ALONE.finditer(text)
        if not (found[1] in "AI" and WORD.match(text, found.end()))
    ]
    return alone[-1] if alone else None
