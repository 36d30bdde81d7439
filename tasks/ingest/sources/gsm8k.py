"""GSM8K (Cobbe et al., arXiv 2110.14168) from a local JSON Lines file: questions verbatim, golds after `####`.

Commas in golds are stripped (1,000 is 1000). The level is the number of lines of the solution: its steps.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tasks.ingest.candidates import MISSING, Candidate, Rejection, field
from tasks.ingest.sources.jsonl import read_lines

SOURCE, MARK = "gsm8k", "####"


@dataclass(frozen=True)
class Settings:
    """`path` of the file, such as grade-school-math's train.jsonl."""

    path: str


def read(settings: Settings) -> Iterator[Candidate | Rejection]:
    return read_lines(settings.path, SOURCE, candidate)


def candidate(line: int, content: str, record: dict[str, Any]) -> Candidate | Rejection:
    """One problem; a solution without the mark has no gold."""
    prompt, solution = field(record, "question"), field(record, "answer")
    if solution is None or solution is MISSING:
        return Candidate(SOURCE, line, content, prompt, solution, "numeric", None)
    steps, mark, gold = str(solution).rpartition(MARK)
    if not mark and gold.strip():
        return Rejection(SOURCE, line, "malformed", f"the solution has no {MARK} before its answer", content)
    level = len([step for step in steps.splitlines() if step.strip()])
    return Candidate(SOURCE, line, content, prompt, gold.strip().replace(",", ""), "numeric", level)
