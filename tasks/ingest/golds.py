"""Reject golds that fail their own verifier: a completion with the gold as its answer must be
graded as correct.

Otherwise every rollout of the prompt would be masked or graded as wrong, after the cost of sampling
them all.

The report counts the prompts that contain special tokens of chats, which are sampled as text."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from tasks.grading.grader import Grader
from tasks.grading.verdict import Verdict
from tasks.ingest.candidates import Rejection, Row

CHUNK_ROWS = 4096  # checked in one call of the grader


@dataclass
class Report:
    """The number of rows with special tokens in the text, and the first such row, by source."""

    marked: Counter[str] = field(default_factory=Counter)
    marks: dict[str, str] = field(default_factory=dict)

    def add(self, row: Row) -> None:
        """Count a row if its text contains special tokens."""
        if row.marker:
            self.marked[row.source] += 1
            self.marks.setdefault(row.source, f"{row.marker!r} in {row.source}, line {row.line}")

    def lines(self) -> list[str]:
        """Return the report as text."""
        return [
            f"{source}: the text of {number} prompts has what chats use as special tokens, such as "
            f"{self.marks[source]}; it is sampled as text"
            for source, number in self.marked.items()
        ]


def check(
    found: Iterable[tuple[int, Row | Rejection]], grader: Grader, report: Report
) -> Iterator[tuple[int, Row | Rejection]]:
    """Yield the items in order, with rows that have a failing gold replaced by rejections."""
    items = iter(found)
    while chunk := list(islice(items, CHUNK_ROWS)):
        rows = [row for _, row in chunk if isinstance(row, Row)]
        verdicts = iter(grader.check_golds([(row.verifier, row.answer) for row in rows]))
        for entry, row in chunk:
            if isinstance(row, Row):
                report.add(row)
                row = checked(row, next(verdicts))
            yield entry, row


def checked(row: Row, verdict: Verdict) -> Row | Rejection:
    """Return the row, or its rejection if its gold fails its own verifier."""
    if verdict.outcome == "correct":
        return row
    detail = (
        f"the verifier {row.verifier} grades the gold {row.answer[:200]!r} against itself as "
        f"{verdict.outcome}: {verdict.answer[:200]}"
    )
    return Rejection(row.line, row.content, "unusable_answer", detail, row.source)


def equal(pairs: Sequence[tuple[str, str, str]], grader: Grader) -> list[bool]:
    """Return, for each (verifier, gold, gold), whether the two golds are the same answer (1,200 and
    1200)."""
    return [
        verdict.outcome == "correct" for verdict in grader.judge([(*pair, "") for pair in pairs])
    ]
