"""Reject golds that fail their own verifier: a completion with the gold as its answer must be
graded as correct.

Otherwise every rollout of the prompt would be masked or graded as wrong, after the cost of sampling
them all."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice

from tasks.grading.grader import Grader
from tasks.grading.verdict import Verdict
from tasks.ingest.candidates import Rejection, Row

CHUNK_ROWS = 4096  # checked in one call of the grader


def check(
    results: Iterable[tuple[int, Row | Rejection]], grader: Grader
) -> Iterator[tuple[int, Row | Rejection]]:
    """Yield the items in order, but a rejection in place of each row whose gold fails the check."""
    items = iter(results)
    while chunk := list(islice(items, CHUNK_ROWS)):
        rows = [row for _, row in chunk if isinstance(row, Row)]
        verdicts = iter(grader.check_golds([(row.verifier, row.answer) for row in rows]))
        for entry, row in chunk:
            if isinstance(row, Row):
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
    # without a completion, a worker compares the gold with a gold passed as the prompt
    verdicts = grader.judge([(name, None, other, gold) for name, gold, other in pairs])
    return [verdict.outcome == "correct" for verdict in verdicts]
