"""GSM8K (Cobbe et al., arXiv 2110.14168), such as grade-school-math's train.jsonl.

Questions verbatim, golds after `####`. Commas in golds are stripped (1,000 is 1000). The level is
the number of lines of the solution: its steps."""

from dataclasses import dataclass

from tasks.ingest.candidates import MISSING, Candidate, Rejection, field
from tasks.ingest.formats import Record

SOURCE = "gsm8k"
MARK = "####"


@dataclass(frozen=True)
class Settings:
    """`path` of the file."""

    path: str


def candidate(record: Record, settings: Settings) -> Candidate | Rejection:
    """Return one problem; a solution without the mark has no gold."""
    prompt = field(record.fields, "question")
    solution = field(record.fields, "answer")
    if solution is None or solution is MISSING:
        return Candidate(SOURCE, record.line, record.content, prompt, solution, "numeric", None)
    steps, mark, gold = str(solution).rpartition(MARK)
    if not mark and gold.strip():
        detail = f"the solution has no {MARK} before its answer"
        return Rejection(SOURCE, record.line, "malformed", detail, record.content)
    level = len([step for step in steps.splitlines() if step.strip()])
    return Candidate(
        SOURCE, record.line, record.content, prompt, gold.strip().replace(",", ""), "numeric", level
    )
