"""Turn sampled rows into graded rollouts, the table ROLLOUTS: the verdict on every completion,
while others are still sampled, and all of it in order.

Texts are in memory some at a time; the rest, and the verdicts, wait in files. What is kept of a
rollout are the eight bytes that tell whether its text has been judged."""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from itertools import chain
from pathlib import Path
from typing import Protocol

import numpy as np
import polars as pl

from tasks.common.artifacts import ROLLOUTS
from tasks.common.progress import progress
from tasks.common.spill import ROW, Spill
from tasks.grading.background import BackgroundGrader
from tasks.grading.grader import Answer, parts_of
from tasks.grading.settings import Verify
from tasks.grading.verdict import Verdict

MAX_WAITING = 2  # batches that wait to be judged, before sampling waits for them
MAX_WHOLE = 2  # parts of a table that is written in one piece
JUDGED = ("outcome", "answer", "reward", "score", "parts")  # columns that come from a verdict
SAMPLED = (ROW, *(name for name in ROLLOUTS.columns if name not in (*JUDGED, "greedy")))


class Source(Protocol):
    """Where rollouts come from, such as `store.rollouts.StoredRollouts`.

    Its parts hold a number `row` from 0 to `num_rows`, the columns SAMPLED, and of the prompt
    `verifier`, `answer`, the gold, and `prompt`, its text. All rollouts of a prompt are within
    `rows_per_part` rows."""

    num_rows: int
    rows_per_part: int

    def parts(self, on_sampled: Callable[[pl.DataFrame], object]) -> Iterator[pl.DataFrame]:
        """Yield every rollout once, in any order; `on_sampled` gets some of them before."""
        ...


class GradedRollouts:
    """The rollouts of one source: `judge` and `add` what it gives, `finish`, then read `parts`."""

    def __init__(
        self, source: Source, grader: BackgroundGrader, rows: Spill, verdicts: Spill, greedy: bool
    ) -> None:
        self.num_parts = -(-source.num_rows // source.rows_per_part)
        self.greedy = greedy
        self.judge_flops = 0.0  # of language models, once all is judged
        self.grader = grader
        self.rows = rows
        self.verdicts = verdicts
        self.waiting: deque[tuple[pl.Series, Future[list[Verdict]]]] = deque()
        # of each rollout a digest of the text that was judged; 0: none was
        self.judged = np.zeros(source.num_rows, np.uint64)

    def judge(self, rows: pl.DataFrame) -> None:
        """Have completions judged in the background, except those that were judged before."""
        places = rows[ROW].to_numpy()
        digests = rows.select("text", "finish_reason").hash_rows().to_numpy()
        new = self.judged[places] != digests
        if not new.any():
            return
        self.judged[places[new]] = digests[new]
        fresh = rows.filter(new)
        self.waiting.append((fresh[ROW], self.grader.submit(answers_of(fresh))))
        self.keep_verdicts(MAX_WAITING)

    def keep_verdicts(self, max_waiting: int) -> None:
        """Keep the verdicts that are there. Wait while more than `max_waiting` batches are to be
        judged; raises what stopped the grader."""
        while self.waiting and (len(self.waiting) > max_waiting or self.waiting[0][1].done()):
            rows, verdicts = self.waiting.popleft()
            self.verdicts.add(verdict_columns(verdicts.result()).with_columns(rows))

    def add(self, rows: pl.DataFrame) -> None:
        """Add rollouts, and have them judged."""
        self.judge(rows)
        self.rows.add(rows.select(SAMPLED))

    def parts(self) -> Iterator[pl.DataFrame]:
        """Yield the ROLLOUTS table in the order of the rows, whole prompts at a time."""
        for number in range(self.num_parts):
            rows, verdicts = self.rows.part(number), self.verdicts.part(number)
            if not rows[ROW].equals(verdicts[ROW]):
                raise AssertionError("every rollout has one verdict")
            graded = pl.concat([rows, verdicts.drop(ROW)], how="horizontal").with_columns(
                greedy=pl.lit(self.greedy)
            )
            yield ROLLOUTS.check(graded.drop(ROW), "graded rollouts")


@contextmanager
def graded_rollouts(
    source: Source, settings: Verify, folder: Path, *, greedy: bool, judged: Path | None = None
) -> Iterator[GradedRollouts]:
    """The rollouts of `source`, all of them judged. `folder` has the room for their texts; the file
    `judged` has the verdicts of language models."""
    with ExitStack() as stack:
        rows, verdicts = (
            stack.enter_context(Spill(folder, source.rows_per_part)) for _ in range(2)
        )
        with (
            progress(source.num_rows, "grade", "answer") as bar,
            BackgroundGrader(settings, source.num_rows, bar.update, judged) as grader,
        ):
            graded = GradedRollouts(source, grader, rows, verdicts, greedy)
            for part in source.parts(graded.judge):
                graded.add(part)
            graded.keep_verdicts(0)
        graded.judge_flops = grader.grader.judge_cost().flops
        yield graded


def write_rollouts(
    path: Path, graded: Sequence[GradedRollouts], on_part: Callable[[pl.DataFrame], object]
) -> None:
    """Write the ROLLOUTS table of all that is `graded`, one after the other, whole or not at all.
    `on_part` gets every part of it, whole prompts at a time.

    What is small is written in one piece, as all other tables are."""

    def parts() -> Iterator[pl.DataFrame]:
        for part in chain.from_iterable(one.parts() for one in graded):
            on_part(part)
            yield part

    if sum(one.num_parts for one in graded) <= MAX_WHOLE:
        ROLLOUTS.write(path, pl.concat(parts()))
    else:
        ROLLOUTS.write_parts(path, parts())


def answers_of(rows: pl.DataFrame) -> list[Answer]:
    """Return the completions with their prompts and gold answers."""
    columns = rows.select("verifier", "text", "answer", "finish_reason", "prompt")
    return [
        Answer(verifier, text, gold, reason == "length", prompt)
        for verifier, text, gold, reason, prompt in columns.iter_rows()
    ]


def verdict_columns(verdicts: Sequence[Verdict]) -> pl.DataFrame:
    """Return the verdicts as the columns JUDGED."""
    values = {
        "outcome": [verdict.outcome for verdict in verdicts],
        "answer": [verdict.answer for verdict in verdicts],
        "reward": [verdict.reward for verdict in verdicts],
        "score": [verdict.score for verdict in verdicts],
        "parts": [parts_of(verdict) for verdict in verdicts],
    }
    return pl.DataFrame(values, schema={name: ROLLOUTS.columns[name] for name in JUDGED})
