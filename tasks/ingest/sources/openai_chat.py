"""Chat rows in OpenAI's format: `messages` with role and content, and a gold.

The gold is a field (`reference_answer`), or, as in fine-tuning files, the assistant's last message,
which is then removed from the prompt."""

from dataclasses import dataclass
from typing import Any

from tasks.ingest.candidates import MISSING, Candidate, field
from tasks.ingest.chat import text_of
from tasks.ingest.files.formats import Record


@dataclass(frozen=True)
class Settings:
    """`answer` is the field of the gold, or null for the assistant's last message; `level` is a
    field, or null. `name` is the `source` of the rows."""

    path: str
    name: str
    answer: str | None
    level: str | None
    verifier: str


def candidate(record: Record, settings: Settings) -> Candidate:
    """Return the candidate for one row, with the gold from a field or from the last message."""
    prompt = field(record.fields, "messages")
    level = field(record.fields, settings.level) if settings.level else None
    if settings.answer is None:
        prompt, answer = split_answer(prompt)
    else:
        answer = field(record.fields, settings.answer)
    return Candidate(prompt, answer, settings.verifier, level)


def split_answer(messages: Any) -> tuple[Any, Any]:
    """Return the messages before a final assistant message, and its text (MISSING without one)."""
    last = messages[-1] if isinstance(messages, list) and messages else None
    if not isinstance(last, dict) or last.get("role") != "assistant":
        return messages, MISSING
    return messages[:-1], text_of(last.get("content"))
