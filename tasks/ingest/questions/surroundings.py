"""The question of a prompt without the text that publishers put around it.

- Attached to the question: figures as code, and options (`(A) 1 (B) 2 (C) 3`). One copy of a
  problem may have them and another may not, but different attachments mean different problems.
- Dropped: sentences about the form of the answer (`The original answer is in the form
  \\frac{k}{m}, please give the value of k + m.`), an exercise's number and points, signatures.

Works on text in the form of `similarity.rewritten`: in lower case, with single spaces. Not
supported: languages other than English."""

import re

PARAGRAPH = "¶"  # in place of blank lines
SENTENCE = re.compile(rf"(?<=[.?!。？！])[$)\]\"'*]*\s+(?=\S)|\s*{PARAGRAPH}\s*")
FIGURE = re.compile(r"\[asy\].*?\[/asy\]|<asy>.*?</asy>|!\[[^\]]*\]\([^)]*\)", re.DOTALL)
FIRST_OPTION = re.compile(r"(?<!\w)\(?a\s*[).]")
OTHER_OPTIONS = re.compile(r"(?>.*?\bb\s*[).]).*?\bc\s*[).]", re.DOTALL)
# sentences with a question or an imperative are kept
ASKS = re.compile(r"[?？]|\b(?:find|compute|calculate|determine|evaluate|solve|prove)\b")
ANSWER_FORM = re.compile(
    r"\b(?:original|final) (?:answer|problem)\b|step by step|"
    r"\banswers? (?:is|are|has|have|(?:should|must|can|will) be) (?:given |expressed |written )?"
    r"(?:in|of|as) .*\bform\b|"
    r"^\W*(?:please |then |and )*(?:express|write|give|enter|leave|report|provide|submit|put|state|"
    r"present|round|type|simplify) (?:(?:your|the|all|each|final|exact|possible) )*answers?\b"
)
EXPRESSED = re.compile(
    r"\b(?:can|may) be (?:uniquely )?(?:expressed|written|represented) (?:as|in the form)\b"
    r"[^.?!]*[.,]? (?:find|compute|determine|calculate|what is)\b[^.?!]*"
)
YEAR = r"\([^()]*\b(?:19|20)\d\d\b[^()]*\)"
LABEL = re.compile(
    r"\(\d+ (?:points?|pts)\)|\[\d+ (?:points?|pts)\]|"
    r"\*?\b(?:proposed|submitted|contributed|authored|created) by .*|"
    rf"^\W*{YEAR}|{YEAR}\W*$|^\s*(?:\[\d{{1,3}}\]|\(\d{{1,3}}\)|\(?[a-h]\))(?=\s)"
)
HEADING = re.compile(
    r"^\W*(?:(?:problem|question|exercise|example|task)\s*#?\d*\W*[.:)*]|\d{1,3}[.)](?=\s))\s*"
)
# the value of a variable at a question's end: `when n = 9`
SPECIAL_CASE = re.compile(r",? (?:when|where|if|for|with) \$?[a-z]\$? ?= ?[\d.]+\$?\W*$")


def parts(text: str) -> tuple[str, str]:
    """Return the question and its attachments, which may be empty. If a text consists only of
    surroundings, all of it is the question."""
    attached = FIGURE.findall(text)
    question = FIGURE.sub(" ", text)
    first = FIRST_OPTION.search(question)
    if first is not None and OTHER_OPTIONS.match(question, first.end()):
        attached.append(question[first.start() :])
        question = question[: first.start()]
    question = LABEL.sub(" ", HEADING.sub(" ", EXPRESSED.sub(" ", question)))
    clauses = sentences(question)
    kept = [each for each in clauses if ASKS.search(each) or not ANSWER_FORM.search(each)]
    question = f" {PARAGRAPH} ".join(kept)
    if not any(character.isalnum() for character in question):
        return text, ""
    return question, " ".join(attached)


def sentences(text: str) -> list[str]:
    """Return the sentences of a text."""
    return [each.strip() for each in SENTENCE.split(text) if each.strip()]
