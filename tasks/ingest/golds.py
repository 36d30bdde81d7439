"""Golds that their own verifier does not accept: given as a completion, a gold must be graded
correct against itself.

A gold that fails would mask or mark wrong every rollout of its prompt, at the price of sampling
them all."""

from collections.abc import Iterable, Iterator, Sequence

from tasks.grading.grader import Grader
from tasks.grading.verdict import Verdict
from tasks.ingest.candidates import Rejection, Row

CHUNK_ROWS = 4096


def check(
    found: Iterable[tuple[int, Row | Rejection]], grader: Grader
) -> Iterator[tuple[int, Row | Rejection]]:
    """What was found, in order, with the rows whose gold fails as rejections."""
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
    verdicts = iter(
        grader.check_golds([(row.verifier, row.answer) for _, row in chunk if isinstance(row, Row)])
    )
    for entry, row in chunk:
        verdict = next(verdicts) if isinstance(row, Row) else None
        if isinstance(row, Row) and verdict is not None and verdict.outcome != "correct":
            yield entry, failed(row, verdict)
        else:
            yield entry, row


def failed(row: Row, verdict: Verdict) -> Rejection:
    detail = (
        f"the verifier {row.verifier} grades the gold {row.answer[:200]!r} against itself as "
        f"{verdict.outcome}"
    )
    return Rejection(
        row.source, row.line, "unusable_answer", f"{detail}: {verdict.answer[:200]}", row.content
    )


def equal(pairs: Sequence[tuple[str, str, str]], grader: Grader) -> list[bool]:
    """Whether two golds are one answer (1,200 and 1200), for each (verifier, gold, gold)."""
    return [verdict.outcome == "correct" for verdict in grader.judge(pairs, None)]
