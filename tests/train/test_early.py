"""Completions are graded while others are sampled, in processes that live as long as the run."""

import random
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from tasks.common.artifacts import PROMPTS
from tasks.engines.engine import OnEnded, Request, Samples
from tasks.train.data.rollouts import Rollouts, make_rollouts
from tasks.train.loop.trainer import Trainer
from tasks.train.sampling import grading
from tasks.train.sampling.grading import Early
from tests.patience import PATIENCE
from tests.train.worlds import make_trainer, make_world, sampled, train_to_end

SIZES = [4] * 36


@pytest.fixture(autouse=True)
def grade_immediately(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grading, "EARLY_SECONDS", 0.0)


def sample_with(trainer: Trainer, report: Callable[[Trainer, Samples, OnEnded], None]) -> Rollouts:
    """Return a step's rollouts from an engine that reports ended completions through `report`."""
    generate = trainer.collector.engine.generate

    def generate_and_report(request: Request, on_ended: OnEnded | None = None) -> Samples:
        samples = generate(request)
        assert on_ended is not None
        report(trainer, samples, on_ended)
        return samples

    trainer.collector.engine.generate = generate_and_report  # type: ignore[method-assign]
    with closing(trainer.collector.grader):
        batch = sampled(trainer)
    return batch.fresh


def test_a_completion_is_graded_before_the_last_has_ended(guesser: Path, tmp_path: Path) -> None:
    def report_one_and_wait(trainer: Trainer, samples: Samples, on_ended: OnEnded) -> None:
        on_ended(0, samples.token_ids[0], samples.finish_reasons[0])
        deadline = time.monotonic() + PATIENCE
        while not trainer.collector.grader.grader.num_graded and time.monotonic() < deadline:
            time.sleep(0.01)
        assert trainer.collector.grader.grader.num_graded == 1

    trainer = make_trainer(make_world(tmp_path, guesser, SIZES))
    rollouts = sample_with(trainer, report_one_and_wait)
    assert trainer.collector.grader.grader.num_graded == len(rollouts.group_B) == 12


@pytest.mark.parametrize("num_reported", [5, 12])
def test_verdicts_do_not_depend_on_the_time_of_grading(
    num_reported: int, guesser: Path, tmp_path: Path
) -> None:
    def report_some(trainer: Trainer, samples: Samples, on_ended: OnEnded) -> None:
        for row in random.Random(num_reported).sample(range(12), num_reported):
            on_ended(row, samples.token_ids[row], samples.finish_reasons[row])

    layout = make_world(tmp_path, guesser, SIZES)
    found = sample_with(make_trainer(layout), report_some)
    expected = sample_with(make_trainer(layout), lambda *_: None)  # graded all at once
    assert expected.table["outcome"].n_unique() > 1
    verdicts = ["text", "outcome", "reward"]
    assert found.table.select(verdicts).equals(expected.table.select(verdicts))


def test_a_copy_of_the_prompt_is_wrong(guesser: Path, tmp_path: Path) -> None:
    layout = make_world(tmp_path, guesser, SIZES)
    prompts = PROMPTS.read(layout.prompts("train"))
    changes = {"verifier": pl.lit("math"), "prompt": pl.lit("What is $3 + 4$?")}
    PROMPTS.write(layout.prompts("train"), prompts.with_columns(**changes))
    trainer = make_trainer(layout)
    collector, tokenizer = trainer.collector, trainer.collector.tokenizer
    ended = [f"{text}{tokenizer.eos_token}" for text in ("3 + 4", "7")]
    token_ids = [tokenizer.encode(text, add_special_tokens=False) for text in ended]
    references = trainer.prompts.table[[0, 0]].select("verifier", "answer", "prompt").rows()
    with closing(collector.grader):
        for num_reported in (0, 2):
            early = Early(collector.grader, tokenizer, references, [[], []])
            for row in range(num_reported):
                early.on_ended(row, token_ids[row], "stop")
            first = np.zeros(1, dtype=np.int64)
            ended = {"token_ids": token_ids, "reason": "stop"}
            table = make_rollouts(first, [[5]], np.repeat(first, 2), **ended).table
            graded = early.finish(table, np.arange(2))
            assert graded["outcome"].to_list() == ["wrong", "correct"]


@pytest.mark.parametrize("max_staleness", [0, 1])
def test_verifiers_are_loaded_once(max_staleness: int, guesser: Path, tmp_path: Path) -> None:
    """They die with the thread that started them, and each round is sampled in its own thread."""
    layout = make_world(tmp_path, guesser, SIZES)
    trainer = make_trainer(layout, max_staleness=max_staleness)
    trainer.collector.grader.grader.pool = None  # not the tests' shared one
    loaders: list[int] = []

    def record(*_: object) -> None:
        pool = trainer.collector.grader.grader.pool
        assert pool is not None
        assert pool.loader is not None
        assert pool.loader.popen.poll() is None
        loaders.append(pool.loader.popen.pid)

    train_to_end(trainer, layout, record)
    assert len(loaders) > 12
    assert len(set(loaders)) == 1
