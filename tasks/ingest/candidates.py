"""What a source yields, and how it becomes a clean row or a rejection with a reason.

A source reads; it does not judge. It hands on each prompt and gold as it found them, and the rules below hold for all
sources alike. Nothing is dropped silently: whatever does not become a row becomes a rejection with its raw text.
"""

import json
import math
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

MISSING = object()
"""The value of a field that the source's row does not have."""


@dataclass(frozen=True)
class Candidate:
    """One row of a source, unjudged: `prompt`, `answer` and `level` as found; `content` is its raw text."""

    source: str
    line: int
    content: str
    prompt: Any
    answer: Any
    verifier: str
    level: Any


@dataclass(frozen=True)
class Rejection:
    """A row of the table `rejected`. Lines count from 1; for a generator they are its problems."""

    source: str
    line: int
    reason: str
    detail: str
    content: str


@dataclass(frozen=True)
class Row:
    """A clean prompt. `line` and `content` stay with it for the case that a later check rejects it."""

    source: str
    line: int
    content: str
    prompt: str
    answer: str
    verifier: str
    level: str


def clean(candidate: Candidate, template: str | None) -> Row | Rejection:
    """The row, its prompt put into `template` and otherwise verbatim; or why it cannot be used."""
    problem = problem_of(candidate)
    if problem is not None:
        return Rejection(candidate.source, candidate.line, *problem, candidate.content)
    prompt = candidate.prompt if template is None else template.replace("{prompt}", candidate.prompt)
    level = "" if candidate.level is None or candidate.level is MISSING else as_text(candidate.level)
    answer = as_text(candidate.answer).strip()
    return Row(candidate.source, candidate.line, candidate.content, prompt, answer, candidate.verifier, level)


def problem_of(candidate: Candidate) -> tuple[str, str] | None:
    """Reason and detail when the candidate is unusable."""
    prompt, answer = candidate.prompt, candidate.answer
    for name, value in (("prompt", prompt), ("answer", answer), ("level", candidate.level)):
        if value is MISSING and name != "level":
            return "missing_field", f"there is no {name} field"
        if isinstance(value, str) and not encodable(value):
            return "undecodable", f"the {name} has a lone surrogate, which is not a character"
    if prompt is None or (isinstance(prompt, str) and not prompt.strip()):
        return "empty_prompt", f"the prompt is {prompt!r}"
    if answer is None or (isinstance(answer, str) and not answer.strip()):
        return "empty_answer", f"the answer is {answer!r}"
    if not isinstance(prompt, str):
        return "malformed", f"the prompt is {type(prompt).__name__}, not text"
    if not is_text_or_number(answer):
        return "malformed", f"the answer is {answer!r}, neither text nor a finite number"[:200]
    return None


def encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def is_text_or_number(value: Any) -> bool:
    if isinstance(value, float | Decimal):
        return math.isfinite(value)
    return isinstance(value, str | int) and not isinstance(value, bool)


def as_text(value: Any) -> str:
    """Text as it is; numbers without exponent and without a bare `.0`: 145.0 is `145`, 1e20 is `1` and 20 zeros."""
    if isinstance(value, float | Decimal):
        return f"{Decimal(str(value)):f}".removesuffix(".0")
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def field(record: Any, path: str) -> Any:
    """The value at `path` in nested mappings (`reward_model.ground_truth`), or MISSING."""
    for key in path.split("."):
        if not isinstance(record, dict) or key not in record:
            return MISSING
        record = record[key]
    return record
