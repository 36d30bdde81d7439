"""MATH (Hendrycks et al., arXiv 2103.03874), in the original form or in that of DPS (`difficulty`,
`answer`).

The gold is the field `answer`, even if it is empty. For a row without this field, it is the content
of the last `\\boxed{...}` of the solution, or of the last boxes if only `and`, `or` or a comma
joins them. The level is the difficulty, 1 to 5."""

from tasks.grading.answers.marked import gold_boxed
from tasks.ingest.candidates import MISSING, Candidate, Unusable, field
from tasks.ingest.files.formats import File, Record

Settings = File


def candidate(record: Record, settings: File) -> Candidate:
    """Return the candidate for one problem. Raise Unusable if it has neither `answer` nor a box."""
    row = record.fields
    prompt = field(row, "problem")
    answer = field(row, "answer")
    solution = field(row, "solution")
    if answer is MISSING and isinstance(solution, str):
        answer = gold_boxed(solution)
        if answer is None:
            raise Unusable("the solution boxes no answer")
    level = row.get("difficulty", row.get("level"))
    if isinstance(level, str):
        level = level.removeprefix("Level ")  # `Level 3` and 3.0 are both `3`
    return Candidate(prompt, answer, "math", level, solution=solution)
