"""Any file of rows (JSON Lines, JSON, CSV, Parquet): the settings name the fields, nested ones with
dots."""

from dataclasses import dataclass

from tasks.ingest.candidates import Candidate, field
from tasks.ingest.formats import Record


@dataclass(frozen=True)
class Settings:
    """`name` is the `source` of the rows; `prompt` (text or chat messages), `answer` and `level`
    (or null) are names of fields."""

    path: str
    name: str
    prompt: str
    answer: str
    level: str | None
    verifier: str


def candidate(record: Record, settings: Settings) -> Candidate:
    """Return one row by the names of its fields."""
    level = field(record.fields, settings.level) if settings.level else None
    prompt = field(record.fields, settings.prompt)
    answer = field(record.fields, settings.answer)
    return Candidate(
        settings.name, record.line, record.content, prompt, answer, settings.verifier, level
    )
