"""SVAMP (Patel et al., arXiv 2103.07191), SVAMP.json: the prompt is body and question, verbatim;
golds are numbers (145.0 is 145).

The level is the type of problem: Addition, Subtraction, Multiplication, Common-Division."""

from tasks.ingest.candidates import Candidate, field
from tasks.ingest.files.formats import File, Record

Settings = File


def candidate(record: Record, settings: File) -> Candidate:
    """Return the candidate for one problem."""
    body = field(record.fields, "Body")
    question = field(record.fields, "Question")
    both = isinstance(body, str) and isinstance(question, str)
    prompt = f"{body} {question}" if both else question
    answer = field(record.fields, "Answer")
    level = field(record.fields, "Type")
    return Candidate(prompt, answer, "numeric", level)
