"""GSM8K (Cobbe et al., arXiv 2110.14168), such as grade-school-math's train.jsonl.

Questions are kept verbatim; golds follow `####`. Commas in golds are removed (1,000 is 1000). The
level is the number of lines of the solution, which are its steps."""

from tasks.ingest.candidates import MISSING, Candidate, Unusable, field
from tasks.ingest.files.formats import File, Record

MARK = "####"
Settings = File


def candidate(record: Record, settings: File) -> Candidate:
    """Return the candidate for one problem. Raise Unusable for a solution without the mark."""
    prompt = field(record.fields, "question")
    solution = field(record.fields, "answer")
    if solution is None or solution is MISSING:
        return Candidate(prompt, solution, "numeric", None)
    steps, mark, gold = str(solution).rpartition(MARK)
    if not mark and gold.strip():
        raise Unusable(f"the solution has no {MARK} before its answer")
    level = len([step for step in steps.splitlines() if step.strip()])
    gold = gold.strip().replace(",", "")
    return Candidate(prompt, gold, "numeric", level, solution=solution)
