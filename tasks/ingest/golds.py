"""Reject golds that fail their own verifier: a completion with the gold as its answer must be
graded as correct.

Otherwise every rollout of the prompt would be masked or graded as wrong, after the cost of sampling
them all.

The report lists the slowest golds, the number of golds that equal a formula of their prompt (an
answer that copies it is graded as wrong), and the number of prompts that contain special tokens of
chats, which are sampled as text."""

import heapq
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

from tasks.grading.grader import Grader
from tasks.grading.verdict import Verdict
from tasks.ingest.candidates import Rejection, Row

CHUNK_ROWS = 4096  # checked in one call of the grader
MAX_SLOW = 10  # golds listed in the report
MAX_SEARCHED = 1000  # rows per source with a searched prompt: slower than checking the golds


@dataclass
class Report:
    """Facts about the golds: the CPU seconds and places of the slowest, and counts by source: of
    rows with a searched prompt, of rows with a formula that equals the gold, and of rows with
    special tokens in the text."""

    slowest: list[tuple[float, str]] = field(default_factory=list)
    checked: Counter[str] = field(default_factory=Counter)
    copyable: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    marked: Counter[str] = field(default_factory=Counter)
    marks: dict[str, str] = field(default_factory=dict)

    def lines(self) -> list[str]:
        """Return the report as text."""
        found = [
            f"{source}: a copied formula of the prompt would be graded as correct in {number} of "
            f"the first {self.checked[source]} rows, such as {self.examples[source]}; it is graded "
            "as wrong"
            for source, number in self.copyable.items()
        ]
        found += [
            f"{source}: the text of {number} prompts has what chats use as special tokens, such as "
            f"{self.marks[source]}; it is sampled as text"
            for source, number in self.marked.items()
        ]
        slowest = [f"  {seconds:6.2f} s  {where}" for seconds, where in self.slowest]
        return [*found, "the slowest golds, with the CPU time of one verdict:", *slowest]


def check(
    found: Iterable[tuple[int, Row | Rejection]], grader: Grader, report: Report
) -> Iterator[tuple[int, Row | Rejection]]:
    """Yield the items in order, with rows that have a failing gold replaced by rejections."""
    items = iter(found)
    while chunk := list(islice(items, CHUNK_ROWS)):
        yield from check_chunk(chunk, grader, report)


def check_chunk(
    chunk: list[tuple[int, Row | Rejection]], grader: Grader, report: Report
) -> Iterator[tuple[int, Row | Rejection]]:
    """Check the golds of some rows in one call."""
    rows = [row for _, row in chunk if isinstance(row, Row)]
    judged = grader.check_golds([(row.verifier, row.answer) for row in rows])
    add_to(report, rows, judged, grader)
    verdicts = iter(judged)
    for entry, row in chunk:
        verdict = next(verdicts) if isinstance(row, Row) else None
        if isinstance(row, Row) and verdict is not None and verdict.outcome != "correct":
            yield entry, failed(row, verdict)
        else:
            yield entry, row


def add_to(
    report: Report, rows: Sequence[Row], verdicts: Sequence[Verdict], grader: Grader
) -> None:
    """Add the facts about some rows."""
    times = [
        (verdict.seconds, f"{row.verifier} {row.answer[:80]!r} ({place(row)})")
        for row, verdict in zip(rows, verdicts, strict=True)
    ]
    for row in rows:
        if row.marker:
            report.marked[row.source] += 1
            report.marks.setdefault(row.source, f"{row.marker!r} in {place(row)}")
    report.slowest = heapq.nlargest(MAX_SLOW, [*report.slowest, *times])
    chosen = []
    for row, verdict in zip(rows, verdicts, strict=True):
        if verdict.outcome == "correct" and report.checked[row.source] < MAX_SEARCHED:
            report.checked[row.source] += 1
            chosen.append(row)
    formulas = grader.find_copies([(row.verifier, row.answer, row.prompt) for row in chosen])
    for row, formula in zip(chosen, formulas, strict=True):
        if formula:
            report.copyable[row.source] += 1
            report.examples.setdefault(row.source, f"{formula[:80]!r} in {place(row)}")


def place(row: Row) -> str:
    """Return the source and line of a row."""
    return f"{row.source}, line {row.line}"


def failed(row: Row, verdict: Verdict) -> Rejection:
    """Return the rejection of a row with a failing gold."""
    detail = (
        f"the verifier {row.verifier} grades the gold {row.answer[:200]!r} against itself as "
        f"{verdict.outcome}"
    )
    detail = f"{detail}: {verdict.answer[:200]}"
    return Rejection(row.line, row.content, "unusable_answer", detail, row.source)


def equal(pairs: Sequence[tuple[str, str, str]], grader: Grader) -> list[bool]:
    """Return, for each (verifier, gold, gold), whether the two golds are the same answer (1,200 and
    1200)."""
    return [
        verdict.outcome == "correct"
        for verdict in grader.judge([(*pair, "") for pair in pairs], None)
    ]
