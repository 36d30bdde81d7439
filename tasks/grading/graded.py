"""Turn sampled rows into graded rollouts, the table ROLLOUTS: grade completions while others are
still being sampled, and return all rollouts in order.

Only some texts are in memory at a time; the other texts and the verdicts are in files. An 8-byte
digest per rollout stays in memory; it identifies texts that have already been graded."""

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
from tasks.common.disk_buffer import ROW, DiskBuffer
from tasks.common.progress import progress
from tasks.grading.background import BackgroundGrader
from tasks.grading.grader import Answer
from tasks.grading.settings import Verify
from tasks.grading.verdict import Verdict

MAX_WAITING = 2  # sampling waits while more batches than this are ungraded
MAX_WHOLE = 2  # a table of at most this many parts is written in one piece
JUDGED = ("outcome", "answer", "reward", "score", "parts")  # columns filled from a verdict
SAMPLED = (ROW, *(name for name in ROLLOUTS.columns if name not in (*JUDGED, "greedy")))


class Source(Protocol):
    """A source of rollouts, such as `store.fixed_policy.StoredRollouts`.

    Its parts have the columns SAMPLED (`row` is below `num_rows`, and some rows may be missing) and
    three of the prompt: `verifier`, `answer` (the gold) and `prompt` (the text). The rollouts of a
    prompt are all in one block of `rows_per_part` rows."""

    num_rows: int
    num_requested: int  # rows of all parts so far
    rows_per_part: int

    def parts(self, on_sampled: Callable[[pl.DataFrame], object]) -> Iterator[pl.DataFrame]:
        """Yield each rollout once, in any order. Call `on_sampled` with new ones as they arrive."""
        ...


class GradedRollouts:
    """The rollouts of one source. `add` all of them, call `keep_verdicts(0)`, then read `parts`.

    `passed` [num_rows] has 1 for a correct rollout, 0 for a failure of the policy, and -1 for an
    error or a row without a verdict."""

    def __init__(
        self, source: Source, grader: BackgroundGrader, buffers: list[DiskBuffer], greedy: bool
    ) -> None:
        self.num_parts = -(-source.num_rows // source.rows_per_part)
        self.greedy = greedy
        self.judge_flops = 0.0  # of language models, set once everything is graded
        self.grader = grader
        self.rows, self.verdicts = buffers
        self.waiting: deque[tuple[pl.Series, Future[list[Verdict]]]] = deque()
        # per rollout: the digest of the text that was graded, 0 if none was
        self.judged = np.zeros(source.num_rows, np.uint64)
        self.passed = np.full(source.num_rows, -1, np.int8)

    def judge(self, rows: pl.DataFrame) -> None:
        """Submit completions for grading, except those submitted before. Block if too many wait."""
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
        """Store the verdicts that are ready. Wait while more than `max_waiting` batches are
        ungraded. Raise the error that stopped the grader."""
        while self.waiting and (len(self.waiting) > max_waiting or self.waiting[0][1].done()):
            rows, verdicts = self.waiting.popleft()
            columns = verdict_columns(verdicts.result())
            values = columns["outcome"].replace_strict({"correct": 1, "error": -1}, default=0)
            self.passed[rows.to_numpy()] = values
            self.verdicts.add(columns.with_columns(rows))

    def add(self, rows: pl.DataFrame) -> None:
        """Add sampled rollouts, and submit them for grading."""
        self.judge(rows)
        self.rows.add(rows.select(SAMPLED))

    def parts(self) -> Iterator[pl.DataFrame]:
        """Yield the ROLLOUTS table in row order, in parts that do not split a prompt's rollouts."""
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
    source: Source,
    settings: Verify,
    folder: Path,
    *,
    greedy: bool,
    judged: Path | None = None,
    go_on: Callable[[GradedRollouts], bool] | None = None,
) -> Iterator[GradedRollouts]:
    """Yield the rollouts of `source`, all graded. Their texts are spilled to files in `folder`; the
    file `judged` contains the verdicts of language models. If `go_on` is given, it is called with
    the verdicts so far, and the source is read again while it returns True."""
    with ExitStack() as stack:
        buffers = [stack.enter_context(DiskBuffer(folder, source.rows_per_part)) for _ in range(2)]
        with (
            progress(source.num_rows, "grade", "answer") as bar,
            BackgroundGrader(settings, source.num_rows, bar.update, judged) as grader,
        ):
            graded = GradedRollouts(source, grader, buffers, greedy)
            is_open = True
            while is_open:
                bar.total = grader.grader.total = source.num_requested
                for part in source.parts(graded.judge):
                    graded.add(part)
                graded.keep_verdicts(0)
                is_open = go_on is not None and go_on(graded)
        graded.judge_flops = grader.grader.judge_flops()
        yield graded


def write_rollouts(
    path: Path, graded: Sequence[GradedRollouts], on_part: Callable[[pl.DataFrame], object]
) -> None:
    """Write the rollouts of every source in `graded`, in order, as one ROLLOUTS table, atomically.
    `on_part` receives every part; no part splits a prompt's rollouts.

    A small table is written in one piece, like all other tables."""

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
    """Return verdicts as the columns JUDGED of a rollout table."""
    rows = []
    for verdict in verdicts:
        parts = [{"verifier": name, "score": score} for name, score in verdict.parts]
        rows.append((verdict.outcome, verdict.answer, verdict.reward, verdict.score, parts))
    schema = {name: ROLLOUTS.columns[name] for name in JUDGED}
    return pl.DataFrame(rows, schema=schema, orient="row")
