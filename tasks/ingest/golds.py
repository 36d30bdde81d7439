"""Reject golds that their own verifier does not accept: a completion that gives the gold must be
graded as correct.

Otherwise every rollout of the prompt would be masked or graded as wrong, after paying for sampling
them all."""

from collections.abc import Iterable, Iterator, Sequence

from tasks.grading.grader import Grader
from tasks.grading.verdict import Verdict
from tasks.ingest.candidates import Rejection, Row

CHUNK_ROWS = 4096  # checked in one call of the grader


def check(
    found: Iterable[tuple[int, Row | Rejection]], grader: Grader
) -> Iterator[tuple[int, Row | Rejection]]:
    """Yield what was found, in order, with the rows whose gold fails as rejections."""
    chunk: list[tuple[int, Row | Rejection]] = []
    for item in found:
        chunk.append(item)
        if len(chunk) == CHUNK_ROWS:
            yield from check_chunk(chunk, grader)
            chunk = []
    yield from check_chunk(chunk, grader)


def check_chunk(
    chunk: list[tuple[int, Row | Rejection]], grader: Grader
) -> Iterator[tuple[int, Row | Rejection]]:
    """Check the golds of some rows in one call."""
    golds = [(row.verifier, row.answer) for _, row in chunk if isinstance(row, Row)]
    verdicts = iter(grader.check_golds(golds))
    for entry, row in chunk:
        verdict = next(verdicts) if isinstance(row, Row) else None
        if isinstance(row, Row) and verdict is not None and verdict.outcome != "correct":
            yield entry, failed(row, verdict)
        else:
            yield entry, row


def failed(row: Row, verdict: Verdict) -> Rejection:
    """Return the rejection of a row whose gold fails."""
    detail = (
        f"the verifier {row.verifier} grades the gold {row.answer[:200]!r} against itself as "
        f"{verdict.outcome}"
    )
    return Rejection(
        row.source, row.line, "unusable_answer", f"{detail}: {verdict.answer[:200]}", row.content
    )


def equal(pairs: Sequence[tuple[str, str, str]], grader: Grader) -> list[bool]:
    """Return, for each (verifier, gold, gold), whether the two golds are the same answer (1,200 and
    1200)."""
    return [verdict.outcome == "correct" for verdict in grader.judge(pairs, None)]
