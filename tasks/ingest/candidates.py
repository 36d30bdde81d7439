"""What a source yields, and how it becomes a clean row or a rejection with a reason.

A source reads and does not judge. It passes on each prompt and gold as it found them, and the rules
below apply to all sources. Nothing is dropped silently: what does not become a row becomes a
rejection with its raw text."""

import json
import math
import re
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from decimal import Decimal
from typing import Any

from tasks.ingest import chat
from tasks.ingest.fields import MISSING as MISSING
from tasks.ingest.fields import field as field
from tasks.ingest.formats import printable

MAX_LABEL = 200  # characters of a level or a source
# special tokens with which chats of well-known policies begin and end turns: ChatML and Llama 3,
# DeepSeek, Gemma, Mistral, Llama 2
MARKER = re.compile(
    r"<\|[^|<>\s]{1,40}\|>|<｜[^｜<>\s]{1,40}｜>|<(?:start|end)_of_turn>|<[be]os>|\[/?INST\]|</?s>"
)
UNPRINTED = ("Cc", "Zl", "Zp")  # Unicode's control characters and separators of lines


@dataclass(frozen=True)
class Candidate:
    """One row of a source before it is judged: `prompt` (text or chat messages), `answer` and
    `level` as found; `content` is its raw text. `question` is the question alone where the source
    has it, or null."""

    source: str
    line: int
    content: str
    prompt: Any
    answer: Any
    verifier: str
    level: Any
    question: Any = None


@dataclass(frozen=True)
class Rejection:
    """A row of the table `rejected`. Lines count from 1; for a generator they count its
    problems."""

    source: str
    line: int
    reason: str
    detail: str
    content: str


@dataclass(frozen=True)
class Row:
    """A clean prompt. `asked` is the question without template and system message, as far as the
    source tells it apart; prompts are compared by it. `template` was put around the text of a plain
    prompt. `marker` is the first special token of a well-known policy that the text spells, or
    empty. `line` and `content` are kept in case a later check rejects the row."""

    source: str
    line: int
    content: str
    asked: str
    prompt: str
    messages: str | None
    template: str | None
    marker: str
    answer: str
    verifier: str
    level: str


@dataclass(frozen=True)
class Limits:
    """What applies to every row of a source: the template, and the longest prompt in characters;
    null for neither."""

    template: str | None
    max_characters: int | None


def clean(candidate: Candidate, limits: Limits) -> Row | Rejection:
    """Return the row, its prompt put into the template and otherwise verbatim, or the reason why it
    cannot be used.

    Chat messages in a template become plain text; without a template they stay messages."""
    problem = problem_of(candidate)
    if problem is not None:
        return rejection(candidate, *problem)
    # the whole prompt as plain text, the question in it, and the messages if there is no template
    text = asked = candidate.prompt
    messages = None
    if isinstance(candidate.prompt, list):
        found = chat.messages_of(candidate.prompt)
        if isinstance(found, str):
            return rejection(candidate, "malformed", found)
        text = chat.flattened(found)
        asked = chat.asked(found)
        messages = json.dumps(found, ensure_ascii=False) if limits.template is None else None
    if not asked.strip():
        return rejection(candidate, "empty_prompt", f"the prompt is {asked!r}")
    if limits.max_characters is not None and len(text) > limits.max_characters:
        detail = (
            f"the prompt has {len(text)} characters, ingest.max_prompt_characters is "
            f"{limits.max_characters}"
        )
        return rejection(candidate, "too_long", detail)
    prompt = limits.template.replace("{prompt}", text) if limits.template else asked
    marker = MARKER.search(text)
    if isinstance(candidate.question, str) and candidate.question.strip():
        asked = candidate.question
    has_level = candidate.level is not None and candidate.level is not MISSING
    level = as_text(candidate.level).strip() if has_level else ""
    return Row(
        candidate.source,
        candidate.line,
        candidate.content,
        asked,
        prompt,
        messages,
        limits.template,
        marker[0] if marker else "",
        as_text(candidate.answer).strip(),
        candidate.verifier,
        level,
    )


def rejection(candidate: Candidate, reason: str, detail: str) -> Rejection:
    """Return the candidate as a rejection."""
    return Rejection(printable(candidate.source), candidate.line, reason, detail, candidate.content)


def problem_of(candidate: Candidate) -> tuple[str, str] | None:
    """Return the reason and the detail if the candidate is unusable."""
    prompt = candidate.prompt
    answer = candidate.answer
    for name in ("prompt", "answer", "level", "source", "question"):
        value = getattr(candidate, name)
        if value is MISSING and name != "level":
            return "missing_field", f"there is no {name} field"
        bad = next((problem for text in texts(value) if (problem := undecodable(text))), None)
        if bad:
            return "undecodable", f"the {name} has {bad}"
        if name in ("level", "source") and value is not MISSING and value is not None:
            problem = label_problem(as_text(value).strip())
            if problem:
                return "malformed", f"the {name} {problem}: it labels tables; choose another field"
    if prompt is None or (
        isinstance(prompt, str | list)
        and not (prompt.strip() if isinstance(prompt, str) else prompt)
    ):
        return "empty_prompt", f"the prompt is {prompt!r}"
    if answer is None or (isinstance(answer, str) and not answer.strip()):
        return "empty_answer", f"the answer is {answer!r}"
    if not isinstance(candidate.question, str | None):
        return "malformed", f"the question is {type(candidate.question).__name__}, not text"
    if not isinstance(prompt, str | list):
        return "malformed", f"the prompt is {type(prompt).__name__}, neither text nor chat messages"
    if not is_text_or_number(answer) and not isinstance(answer, bool):
        return (
            "malformed",
            f"the answer is {printable(repr(answer))}, neither text, number nor boolean"[:200],
        )
    return None


def label_problem(text: str) -> str | None:
    """Return why a text cannot be a label in tables, charts and records, or None."""
    if len(text) > MAX_LABEL:
        return f"has {len(text):,} characters, and can have {MAX_LABEL}"
    if bad := next((c for c in text if unicodedata.category(c) in UNPRINTED), None):
        return f"has the control character {bad!a}"
    return None


def texts(value: Any, depth: int = 8) -> Iterator[str]:
    """Yield every text in a JSON-like value; chat messages with parts are five levels deep."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list) and depth:
        for part in value.values() if isinstance(value, dict) else value:
            yield from texts(part, depth - 1)


def undecodable(text: str) -> str | None:
    """Return what `text` contains that is not a character, or None."""
    if "\0" in text:
        return "a NUL byte"
    try:
        text.encode()
    except UnicodeEncodeError:
        return "bytes that are not UTF-8, or a lone surrogate, which is no character"
    return None


def is_text_or_number(value: Any) -> bool:
    """Whether a value is text or a finite number."""
    if isinstance(value, float | Decimal):
        return math.isfinite(value)
    return isinstance(value, str | int) and not isinstance(value, bool)


def as_text(value: Any) -> str:
    """Return text as it is, numbers without exponent or bare `.0` (145.0 is `145`, 1e20 is `1` and
    20 zeros), and booleans as `true` and `false`."""
    if isinstance(value, float | Decimal):
        return f"{Decimal(str(value)):f}".removesuffix(".0")
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)
