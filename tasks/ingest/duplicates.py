"""Rows that ask the same question: one is kept; when their golds differ, none can be trusted and all go.

The same question is the same text up to Unicode composition, upper and lower case, and white space. Punctuation
counts: `z^4 - z^2 + 1` and `z^4 + z^2 + 1` are two questions.
"""

import unicodedata

from tasks.ingest.candidates import Rejection, Row


def normalised(prompt: str) -> str:
    """The text by which prompts are compared."""
    return " ".join(unicodedata.normalize("NFC", prompt).casefold().split())


def resolve(rows: list[Row]) -> tuple[list[Row], list[Rejection]]:
    """The rows that are kept, in order, and a rejection for each of the others."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(normalised(row.prompt), []).append(row)
    kept, rejected = [], []
    for group in groups.values():
        answers = list(dict.fromkeys(row.answer for row in group))
        if len(answers) > 1:
            detail = f"the same prompt has the answers {', '.join(answers[:5])}"
            rejected += [reject(row, "conflicting_answers", detail) for row in group]
        else:
            kept.append(group[0])
            detail = f"same prompt and answer as {group[0].source} line {group[0].line}"
            rejected += [reject(row, "duplicate", detail) for row in group[1:]]
    return kept, rejected


def reject(row: Row, reason: str, detail: str) -> Rejection:
    return Rejection(row.source, row.line, reason, detail, row.content)
