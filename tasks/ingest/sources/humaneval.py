"""HumanEval (Chen et al., arXiv 2107.03374): a function's head with its description, and a function
`check` with assertions, for the verifier `code`.

The prompt is an instruction and the head. The gold is the assertions of `check`, one test each
(`code_tests.gold_of_humaneval`). A `check` with a loop or a variable is one test that can only run
beside the program: the verifier refuses it unless its setting `other_asserts` is `run`.
`canonical_solution` is not used. Written from the published columns; not checked on real rows."""

from dataclasses import dataclass

from tasks.grading.code_tests import gold_of_humaneval
from tasks.ingest.candidates import MISSING, Candidate, Rejection, field
from tasks.ingest.formats import Record

SOURCE = "humaneval"
INSTRUCTION = "Complete this program. Give all of it, with its imports, in one block of Python."


@dataclass(frozen=True)
class Settings:
    """`path` of the file."""

    path: str


def candidate(record: Record, settings: Settings) -> Candidate | Rejection:
    """Return one function; tests without `check` are a rejection."""
    row = record.fields
    head, test, name = (field(row, key) for key in ("prompt", "test", "entry_point"))
    if not all(isinstance(value, str) and value for value in (head, test, name)):
        absent = MISSING in (test, name)
        answer = MISSING if absent else ""
        return Candidate(SOURCE, record.line, record.content, head, answer, "code", None)
    try:
        answer = gold_of_humaneval(test, name)
    except ValueError as error:
        detail = f"the tests cannot be read: {error}"[:300]
        return Rejection(SOURCE, record.line, "malformed", detail, record.content)
    prompt = f"{INSTRUCTION}\n```python\n{head.strip()}\n```\n"
    return Candidate(SOURCE, record.line, record.content, prompt, answer, "code", None, head)
