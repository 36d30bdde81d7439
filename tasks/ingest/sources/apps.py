"""APPS (Hendrycks et al., arXiv 2105.09938) and data with the same columns, such as TACO's: a
problem, with its tests as `input_output`, for the verifier `code`.

The prompt is the question, followed by `starter_code` in a block, if present. The level is the
difficulty. `solutions` and `url` are not used. Written from the published columns; not checked on
real rows."""

from typing import Any

from tasks.grading.programs.golds import gold_of_apps
from tasks.ingest.candidates import MISSING, Candidate, field
from tasks.ingest.files.formats import File, Record

Settings = File


def candidate(record: Record, settings: File) -> Candidate:
    """Return the candidate for one problem. Raise ValueError or TypeError for unreadable tests."""
    row = record.fields
    answer = field(row, "input_output")
    if answer is not MISSING and answer:
        answer = gold_of_apps(answer)
    prompt = prompt_of(field(row, "question"), row.get("starter_code"))
    return Candidate(prompt, answer, "code", field(row, "difficulty"))


def prompt_of(question: Any, starter: Any) -> Any:
    """Return the question with the starter code."""
    if not isinstance(question, str) or not isinstance(starter, str) or not starter.strip():
        return question
    return f"{question.rstrip()}\n\nStart from this code:\n```python\n{starter.strip()}\n```\n"
