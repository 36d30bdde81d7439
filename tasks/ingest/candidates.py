"""The rows that a source yields, and their conversion to clean rows or to rejections with a reason.

A source turns each record into a Candidate, or raises Unusable for a record in another form. The
rules below then apply to the candidates of all sources. No row is dropped silently: a row that
raises Unusable becomes a rejection with its reason and its raw text."""

import json
import math
import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from decimal import Decimal
from typing import Any

from tasks.ingest import chat
from tasks.ingest.fields import MISSING as MISSING
from tasks.ingest.fields import Unusable as Unusable
from tasks.ingest.fields import field as field
from tasks.ingest.files.formats import Record, printable
from tasks.ingest.files.formats import Rejection as Rejection
from tasks.ingest.settings import Source

MAX_LABEL = 200  # characters of a level or a source
# special tokens at the beginning and end of turns in well-known chat formats: ChatML and Llama 3,
# DeepSeek, Gemma, Mistral, Llama 2
MARKER = re.compile(
    r"<\|[^|<>\s]{1,40}\|>|<｜[^｜<>\s]{1,40}｜>|<(?:start|end)_of_turn>|<[be]os>|\[/?INST\]|</?s>"
)
NOT_FINITE = re.compile(r"nan|NaN|[-+]?(?:inf|Infinity)")  # as CSV files write them
UNPRINTED = ("Cc", "Zl", "Zp")  # Unicode's control characters and separators of lines


@dataclass(frozen=True)
class Candidate:
    """One row before validation, as read: `prompt` is text or chat messages; `question` is the bare
    question and `solution` a worked solution, if the source has them. `source`, unless it is None,
    replaces the entry's name."""

    prompt: Any
    answer: Any
    verifier: str
    level: Any = None
    question: Any = None
    source: Any = None
    solution: Any = None


@dataclass(frozen=True)
class Row:
    """A clean prompt. `question`, the text by which prompts are compared, is the source's bare
    question, or else the prompt without template or system message. `prompt` includes the source's
    `template`. `marker` is the text's first special token of a well-known chat format, or empty.
    `line` and `content` (the record's raw text) are kept in case a later check rejects the row."""

    source: str
    line: int
    content: str
    question: str
    prompt: str
    messages: str | None
    template: str | None
    marker: str
    answer: str
    verifier: str
    level: str
    solution: str | None = None


def clean(candidate: Candidate, record: Record, source: Source, max_characters: int | None) -> Row:
    """Return the row. Its prompt is kept verbatim, inside the source's template if there is one.
    Raise Unusable if the row cannot be used, for example if the prompt is longer than
    `max_characters` (null: no limit).

    Chat messages in a template become plain text; without a template they stay messages. The
    source's system message replaces any existing one; it and shots turn plain text into a chat."""
    check(candidate)
    text = question = candidate.prompt
    messages = [{"role": "user", "content": text}]
    is_chat = isinstance(candidate.prompt, list)
    if is_chat:
        messages = chat.messages_of(candidate.prompt)
        text, question = chat.flattened(messages), chat.question(messages)
    if not question.strip():
        raise Unusable(f"the prompt is {question!r}", "empty_prompt")
    if max_characters is not None and len(text) > max_characters:
        raise Unusable(
            f"the prompt has {len(text)} characters, ingest.max_prompt_characters is "
            f"{max_characters}",
            "too_long",
        )
    if any(question.strip() == shot.prompt.strip() for shot in source.shots or ()):
        raise Unusable("the question is one of the source's shots", "demonstrated")
    if source.system is not None or source.shots:
        messages, is_chat = chat.led(messages, source), True
    template = source.template
    prompt = template.replace("{prompt}", text) if template else question
    marker = MARKER.search(text)
    if isinstance(candidate.question, str) and candidate.question.strip():
        question = candidate.question
    has_level = candidate.level is not None and candidate.level is not MISSING
    return Row(
        source=candidate.source,
        line=record.line,
        content=record.content,
        question=question,
        prompt=prompt,
        messages=json.dumps(messages, ensure_ascii=False) if is_chat and template is None else None,
        template=template,
        marker=marker[0] if marker else "",
        answer=as_text(candidate.answer).strip(),
        verifier=candidate.verifier,
        level=as_text(candidate.level).strip() if has_level else "",
        solution=solution_of(candidate),
    )


def solution_of(candidate: Candidate) -> str | None:
    """Return the worked solution; None if it is blank, or not text that a table can store."""
    text = candidate.solution
    is_usable = isinstance(text, str) and text.strip() and not undecodable(text)
    return text.strip() if is_usable else None


def check(candidate: Candidate) -> None:
    """Raise Unusable for a field that is missing, empty or of a wrong type, or cannot be stored."""
    prompt = candidate.prompt
    answer = candidate.answer
    for name in ("prompt", "answer", "level", "source", "question"):
        value = getattr(candidate, name)
        if value is MISSING and name != "level":
            raise Unusable(f"there is no {name} field", "missing_field")
        bad = next((problem for text in texts(value) if (problem := undecodable(text))), None)
        if bad:
            raise Unusable(f"the {name} has {bad}", "undecodable")
        if name in ("level", "source") and value is not MISSING and value is not None:
            problem = label_problem(as_text(value).strip())
            if problem:
                raise Unusable(f"the {name} {problem}: it labels tables; choose another field")
    if prompt in (None, []) or (isinstance(prompt, str) and not prompt.strip()):
        raise Unusable(f"the prompt is {prompt!r}", "empty_prompt")
    if answer is None or (isinstance(answer, str) and not answer.strip()):
        raise Unusable(f"the answer is {answer!r}", "empty_answer")
    if isinstance(answer, str) and NOT_FINITE.fullmatch(answer.strip()):
        raise Unusable(f"the answer is {answer.strip()}, which is not a finite number")
    if not isinstance(candidate.question, str | None):
        raise Unusable(f"the question is {type(candidate.question).__name__}, not text")
    if not isinstance(prompt, str | list):
        raise Unusable(f"the prompt is {type(prompt).__name__}, neither text nor chat messages")
    if not is_text_or_number(answer) and not isinstance(answer, bool):
        detail = f"the answer is {printable(repr(answer))}, neither text, number nor boolean"
        raise Unusable(detail[:200])


def label_problem(text: str) -> str | None:
    """Return why a text cannot be a label in tables, charts and records, or None."""
    if len(text) > MAX_LABEL:
        return f"has {len(text):,} characters, and can have {MAX_LABEL}"
    if bad := next((c for c in text if unicodedata.category(c) in UNPRINTED), None):
        return f"has the control character {bad!a}"
    return None


def texts(value: Any, depth: int = 8) -> Iterator[str]:
    """Yield the strings in lists and dicts nested up to `depth` levels (chat messages: up to 4)."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list) and depth:
        for part in value.values() if isinstance(value, dict) else value:
            yield from texts(part, depth - 1)


def undecodable(text: str) -> str | None:
    """Return why `text` cannot be stored (a NUL byte, a lone surrogate), or None."""
    if "\0" in text:
        return "a NUL byte"
    try:
        text.encode()
    except UnicodeEncodeError:
        return "bytes that are not UTF-8, or a lone surrogate, which is not a character"
    return None


def is_text_or_number(value: Any) -> bool:
    """Return whether a value is text or a finite number."""
    if isinstance(value, float | Decimal):
        return math.isfinite(value)
    return isinstance(value, str | int) and not isinstance(value, bool)


def as_text(value: Any) -> str:
    """Return text unchanged, numbers without an exponent or a trailing `.0` (145.0 becomes `145`,
    and 1e20 becomes `1` followed by 20 zeros), dates as ISO 8601, other values as JSON (`true`)."""
    if isinstance(value, float | Decimal):
        return f"{Decimal(str(value)):f}".removesuffix(".0")
    if isinstance(value, str | date):
        return str(value)
    return json.dumps(value, ensure_ascii=False, default=str)
