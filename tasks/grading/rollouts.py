"""Turn sampled rows into graded rollouts: the verdict on every completion, in the table
ROLLOUTS."""

import polars as pl

from tasks.common.artifacts import ROLLOUTS
from tasks.common.progress import progress
from tasks.grading.grader import Answer, Grader, Verify, parts_of


def grade_rows(rows: pl.DataFrame, settings: Verify, *, greedy: bool) -> pl.DataFrame:
    """Return the ROLLOUTS table of store rows that are joined with their prompts' gold answers."""
    answers = [
        Answer(verifier, text, gold, reason == "length")
        for verifier, text, gold, reason in rows.select(
            "verifier", "text", "answer", "finish_reason"
        ).iter_rows()
    ]
    with Grader(settings) as grader, progress(len(answers), "grade", "answer") as bar:
        verdicts = grader.grade(answers, bar.update)
    graded = rows.drop("answer").with_columns(
        greedy=pl.lit(greedy),
        outcome=pl.Series([verdict.outcome for verdict in verdicts], dtype=pl.String),
        answer=pl.Series([verdict.answer for verdict in verdicts], dtype=pl.String),
        reward=pl.Series([verdict.reward for verdict in verdicts], dtype=pl.Float64),
        score=pl.Series([verdict.score for verdict in verdicts], dtype=pl.Float64),
        parts=pl.Series(
            [parts_of(verdict) for verdict in verdicts], dtype=ROLLOUTS.columns["parts"]
        ),
    )
    return ROLLOUTS.check(graded.select(list(ROLLOUTS.columns)), "graded rollouts")
