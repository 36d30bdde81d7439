"""SVAMP (Patel et al., arXiv 2103.07191), SVAMP.json: the prompt is body and question, verbatim;
golds are numbers (145.0 is 145).

The level is the kind of problem: Addition, Subtraction, Multiplication, Common-Division."""

from dataclasses import dataclass

from tasks.ingest.candidates import Candidate, field
from tasks.ingest.formats import Record


@dataclass(frozen=True)
class Settings:
    """`path` of the file."""

    path: str


def candidate(record: Record, settings: Settings) -> Candidate:
    """Return one problem."""
    body = field(record.fields, "Body")
    question = field(record.fields, "Question")
    both = isinstance(body, str) and isinstance(question, str)
    prompt = f"{body} {question}" if both else question
    answer = field(record.fields, "Answer")
    level = field(record.fields, "Type")
    return Candidate("svamp", record.line, record.content, prompt, answer, "numeric", level)
