"""MATH (Hendrycks et al., arXiv 2103.03874), in its own form or that of DPS (`difficulty`,
`answer`).

The gold is the field `answer`; only if a row has no such field, it is the content of the last
`\\boxed{...}` of the solution, or of the last ones where only `and` joins them. An empty `answer`
is not replaced. The level is the difficulty, 1 to 5."""

from dataclasses import dataclass
from typing import Any

from tasks.grading.answers import gold_boxed
from tasks.ingest.candidates import MISSING, Candidate, Rejection, field
from tasks.ingest.formats import Record

SOURCE = "math"


@dataclass(frozen=True)
class Settings:
    """`path` of the file."""

    path: str


def candidate(record: Record, settings: Settings) -> Candidate | Rejection:
    """Return one problem; the gold of a row without `answer` is in the solution's box."""
    row = record.fields
    prompt = field(row, "problem")
    answer = field(row, "answer")
    solution = field(row, "solution")
    if answer is MISSING and isinstance(solution, str):
        answer = gold_boxed(solution)
        if answer is None:
            return Rejection(
                SOURCE, record.line, "malformed", "the solution boxes no answer", record.content
            )
    return Candidate(SOURCE, record.line, record.content, prompt, answer, "math", level_of(row))


def level_of(row: dict[str, Any]) -> Any:
    """Return the level; `Level 3` and 3.0 are both `3`."""
    level = row.get("difficulty", row.get("level"))
    return level.removeprefix("Level ") if isinstance(level, str) else level
