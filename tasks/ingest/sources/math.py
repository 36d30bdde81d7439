"""MATH (Hendrycks et al., arXiv 2103.03874), in its own form or in the form of DPS (`difficulty`,
`answer`).

The gold is the field `answer`, or, only if a row has no such field, the content of the last
`\\boxed{...}` of the solution, or of the last boxes if only `and` joins them. An empty `answer` is
not replaced. The level is the difficulty, 1 to 5."""

from typing import Any

from tasks.grading.answers.marked import gold_boxed
from tasks.ingest.candidates import MISSING, Candidate, Unusable, field
from tasks.ingest.files.formats import File, Record

Settings = File


def candidate(record: Record, settings: File) -> Candidate:
    """Return one problem; the gold of a row without `answer` is in the solution's box."""
    row = record.fields
    prompt = field(row, "problem")
    answer = field(row, "answer")
    solution = field(row, "solution")
    if answer is MISSING and isinstance(solution, str):
        answer = gold_boxed(solution)
        if answer is None:
            raise Unusable("the solution boxes no answer")
    return Candidate(prompt, answer, "math", level_of(row), solution=solution)


def level_of(row: dict[str, Any]) -> Any:
    """Return the level; `Level 3` and 3.0 are both `3`."""
    level = row.get("difficulty", row.get("level"))
    return level.removeprefix("Level ") if isinstance(level, str) else level
