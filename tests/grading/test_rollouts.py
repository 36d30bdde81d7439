"""Rollouts are graded during sampling, and written in the order of the rows."""

import contextlib
import itertools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import polars as pl
import psutil
import pytest

from tasks.common.artifacts import ROLLOUTS
from tasks.grading.graded import graded_rollouts, write_rollouts
from tasks.grading.grader import FailureRateError
from tasks.grading.settings import Verify
from tests.grading.judge_server import configured, judge_server
from tests.patience import PATIENCE, wait_for

CONFIGURED = {
    "tags": {"method": "format", "tags": ["b"], "text_after": True},
    "both": {"method": "composite", "weights": {"numeric": 0.75, "tags": 0.25}},
}
VERIFY = Verify(1, 5.0, 4.0, 0.5, CONFIGURED)


def graders() -> list[int]:
    """Return the descendants of this process that run verifiers."""
    found = []
    for child in psutil.Process(os.getpid()).children(recursive=True):
        with contextlib.suppress(psutil.Error):
            if "tasks.grading.verifier_worker" in child.cmdline():
                found.append(child.pid)
    return found


def rows(
    *numbers: int, text: str = "{}", verifier: str = "numeric", prompt: str = "What?"
) -> pl.DataFrame:
    """Return two rollouts per prompt. The gold of prompt n is n, and each third is truncated."""
    data = [
        {
            **ROLLOUTS.example,
            "row": n,
            "prompt_id": f"p{n // 2}",
            "sample_index": n % 2,
            "text": text.format(n),
            "finish_reason": "length" if n % 3 == 2 else "stop",
            "verifier": verifier,
            "prompt": prompt,
            "answer": str(n // 2 * 2),
        }
        for n in numbers
    ]
    types = {**ROLLOUTS.columns, "row": pl.UInt32, "verifier": pl.String, "prompt": pl.String}
    return pl.DataFrame(data, schema=types).drop("greedy", "outcome", "reward", "score", "parts")


@dataclass
class Given:
    """A source that first reports `sampled` and calls `after_sampled` for each, and then yields
    `read`."""

    read: Sequence[pl.DataFrame]
    sampled: Iterable[pl.DataFrame] = ()
    rows_per_part: int = 4
    after_sampled: Callable[[pl.DataFrame], object] = lambda _: None

    @property
    def num_rows(self) -> int:
        return sum(map(len, self.read))

    num_requested = num_rows

    def parts(self, on_sampled: Callable[[pl.DataFrame], object]) -> Iterator[pl.DataFrame]:
        for batch in self.sampled:
            on_sampled(batch)
            self.after_sampled(batch)
        yield from self.read


def graded(source: Given, folder: Path, settings: Verify = VERIFY) -> pl.DataFrame:
    with graded_rollouts(source, settings, folder, greedy=False) as found:
        return pl.concat(found.parts())


def test_reused_verdicts_are_charged(tmp_path: Path) -> None:
    source = Given([rows(0, 1, 2, verifier="j", text="yes {}"), rows(3, verifier="j")])
    with judge_server() as server:
        settings = replace(VERIFY, verifiers=configured(server))
        file = tmp_path / "judged.sqlite"
        for _ in range(2):  # stored verdicts are not free
            with graded_rollouts(source, settings, tmp_path, greedy=False, judged=file) as found:
                outcomes = pl.concat(found.parts())["outcome"].to_list()
                assert outcomes == ["correct", "correct", "truncated", "wrong"]
                assert found.judge_flops == 3 * 2 * 7e9 * 100
    assert len(server.requests) == 3


def test_prompt_reaches_the_verifier(tmp_path: Path) -> None:
    source = Given([rows(0, 1, text="{} + 0 + 0", verifier="math", prompt="What is $0 + 0 + 0$?")])
    assert graded(source, tmp_path)["outcome"].to_list() == ["wrong", "wrong"]


def test_outcomes_by_hand_in_any_order_of_shards_and_earlier_samples(tmp_path: Path) -> None:
    """This includes composites, whose parts are a list."""

    def make(*numbers: int) -> pl.DataFrame:
        return rows(*numbers, text="<b></b>{}", verifier="both")

    shards = [make(7, 2), make(9, 8), make(0, 1, 3, 4, 5, 6)]
    sources = (Given([make(*range(10))]), Given(shards, sampled=[make(5, 0, 9, 2)]))
    found, other = (graded(source, tmp_path) for source in sources)
    assert found.equals(other)
    assert found["prompt_id"].to_list() == [f"p{n // 2}" for n in range(10)]
    assert found["sample_index"].to_list() == [0, 1] * 5
    # the text of an even row is its gold
    expected = ["correct", "wrong", "truncated", "wrong", "correct"]
    expected += ["truncated", "correct", "wrong", "truncated", "wrong"]
    assert found["outcome"].to_list() == expected
    assert found["answer"].to_list()[:4] == ["0", "1", "", "3"]
    rewards = {"correct": 1.0, "wrong": 0.25, "truncated": 0.0}
    assert found["reward"].to_list() == [rewards[outcome] for outcome in expected]
    scores = [{"verifier": "numeric", "score": 0.0}, {"verifier": "tags", "score": 1.0}]
    assert found["parts"].to_list()[1] == scores


def test_rollout_stored_by_another_process_is_graded_by_its_text(tmp_path: Path) -> None:
    sampled, stored = rows(0, 1, text="5"), rows(0, 1, text="0")
    found = graded(Given([stored], sampled=[sampled]), tmp_path)
    assert (found["outcome"].to_list(), found["answer"].to_list()) == (["correct"] * 2, ["0"] * 2)


def test_large_and_small_tables_have_equal_rows(tmp_path: Path) -> None:
    """The small one is written at once, the large one in parts. Both are read in parts."""
    tables, parts_seen = [], []
    for rows_per_part in (2, 100):
        source = Given([rows(*range(10), text="<b></b>{}", verifier="both")], (), rows_per_part)
        path, parts = tmp_path / "rollouts.parquet", []
        with graded_rollouts(source, VERIFY, tmp_path, greedy=True) as found:
            write_rollouts(path, [found], parts.append)
        tables.append(ROLLOUTS.read(path))
        parts_seen.append([part["prompt_id"].to_list() for part in parts])
    assert tables[0].equals(tables[1])
    assert tables[0]["greedy"].all()
    assert parts_seen[0] == [[f"p{n}"] * 2 for n in range(5)]
    assert parts_seen[1] == [[f"p{n // 2}" for n in range(10)]]


def test_failed_write_keeps_the_old_table(tmp_path: Path) -> None:
    path = tmp_path / "rollouts.parquet"
    path.write_text("old")

    def fail(part: pl.DataFrame) -> None:
        if part["prompt_id"][0] == "p4":
            raise KeyboardInterrupt

    source = Given([rows(*range(10))], rows_per_part=2)
    with (
        pytest.raises(KeyboardInterrupt),
        graded_rollouts(source, VERIFY, tmp_path, greedy=False) as found,
    ):
        write_rollouts(path, [found], fail)
    assert (path.read_text(), list(tmp_path.iterdir())) == ("old", [path])


def test_too_many_failures_of_all_answers_end_the_sampling(
    hostile_verifier: Path, tmp_path: Path
) -> None:
    """Five of 20 answers may fail. The limit is for all batches, and is checked during sampling."""
    settings = Verify(1, 5.0, 4.0, 0.25, {})
    batches = [
        rows(0, 1, 3, 4, text=f"{word} {{}}", verifier="hostile").with_columns(
            row=pl.int_range(first, first + 4, dtype=pl.UInt32)
        )
        for word, first in (("raise", 0), ("fine", 4), ("raise", 8), ("fine", 12), ("fine", 16))
    ]
    sampled: list[pl.DataFrame] = []

    def sample(batch: pl.DataFrame) -> None:
        sampled.append(batch)
        if len(sampled) <= 3:  # these are graded before others are sampled
            wait_for((hostile_verifier / batch["text"][3]).exists)
        time.sleep(0.01)

    source = Given(batches, itertools.cycle(batches), after_sampled=sample)
    with pytest.raises(FailureRateError, match=r"'error': 4.*boom.*gold '0'.*8 of 12 in all, over"):
        graded(source, tmp_path, settings)
    assert len(sampled) >= 2  # four failures of twenty are allowed
    few = [batches[0], *(batch for batch in batches if batch["text"][0].startswith("fine"))]
    few.append(batches[1].with_columns(row=pl.int_range(8, 12, dtype=pl.UInt32)))
    assert (graded(Given(few), tmp_path, settings)["outcome"] == "error").sum() == 4


INTERRUPTED = """
import sys
from pathlib import Path
from tasks.grading.grader import Verify
from tests.grading.test_rollouts import Given, graded, rows
def sample(batch):
    while True:
        pass
hanging = [rows(0, 1, text="hang", verifier="hostile")]
source = Given([rows(0, 1)], hanging, after_sampled=sample)
graded(source, Path(sys.argv[1]), Verify(1, 1000.0, 4.0, 0.5, {}))
"""


def test_interrupt_ends_sampling_and_grading(hostile_verifier: Path, tmp_path: Path) -> None:
    """The verifier hangs, with a limit of a quarter of an hour."""
    line = [sys.executable, "-c", INTERRUPTED, str(tmp_path)]
    process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        wait_for((hostile_verifier / "hang").exists)
        children = psutil.Process(process.pid).children(recursive=True)
        assert len(children) == 2  # the loader, and the worker that hangs
        process.send_signal(signal.SIGINT)
        _, log = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
    assert log.splitlines()[-1] == "KeyboardInterrupt"
    assert psutil.wait_procs(children, timeout=PATIENCE)[1] == []


def test_failed_sampling_leaves_no_hanging_grader(hostile_verifier: Path, tmp_path: Path) -> None:
    """A cancelled grader ends its processes."""

    def sample(_: pl.DataFrame) -> None:
        wait_for((hostile_verifier / "hang").exists)
        raise RuntimeError("sampling failed")

    hanging = [rows(0, 1, text="hang", verifier="hostile")]
    source = Given([rows(0, 1)], hanging, after_sampled=sample)
    with pytest.raises(RuntimeError, match="sampling failed"):
        graded(source, tmp_path, Verify(1, 1000.0, 4.0, 0.5, {}))
    wait_for(lambda: graders() == [])
