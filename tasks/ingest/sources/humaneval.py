"""HumanEval (Chen et al., arXiv 2107.03374): a function's signature with its description, and a
function `check` with assertions, for the verifier `code`.

The prompt is an instruction and the signature. The gold is the assertions of `check`, one test each
(`golds.gold_of_humaneval`). A `check` with a loop or a variable is a single test that needs the
program's process: the verifier rejects it unless its setting `other_asserts` is `run`.
`canonical_solution` is not used. Written from the published columns; not checked on real rows."""

from tasks.grading.programs.golds import gold_of_humaneval
from tasks.ingest.candidates import MISSING, Candidate, field
from tasks.ingest.files.formats import File, Record

INSTRUCTION = "Complete this program. Give all of it, with its imports, in one block of Python."
Settings = File


def candidate(record: Record, settings: File) -> Candidate:
    """Return the candidate for one function. Raise ValueError if `test` has no readable `check`."""
    row = record.fields
    head, test, name = (field(row, key) for key in ("prompt", "test", "entry_point"))
    if not all(isinstance(value, str) and value for value in (head, test, name)):
        return Candidate(head, MISSING if MISSING in (test, name) else "", "code", None)
    answer = gold_of_humaneval(test, name)
    prompt = f"{INSTRUCTION}\n```python\n{head.strip()}\n```\n"
    return Candidate(prompt, answer, "code", None, head)
