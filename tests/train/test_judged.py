"""Training on the verdicts of a language model: its tokens stand in the ledger."""

from contextlib import closing
from dataclasses import replace
from pathlib import Path

import polars as pl

from tasks.common.artifacts import PROMPTS
from tasks.grading.background import BackgroundGrader
from tasks.train.loop.checkpoint import Checkpoints
from tasks.train.loop.loop import train
from tasks.train.settings import CheckpointSettings
from tests.grading.judge_server import configured, judge_server
from tests.train.worlds import make_trainer, make_world

FLOPS = 2 * 7e9 * 100  # of one verdict


def test_judging_is_charged_as_scoring(tmp_path: Path, guesser: Path) -> None:
    layout = make_world(tmp_path, guesser, [4, 4, 4])
    for split in ("train", "validation"):
        path = layout.prompts(split)
        PROMPTS.write(path, PROMPTS.read(path).with_columns(verifier=pl.lit("j")))
    with judge_server() as server:
        trainer = make_trainer(layout)
        settings = replace(trainer.collector.grader.grader.settings, verifiers=configured(server))
        with closing(BackgroundGrader(settings, judged=layout.judged)) as grader:
            trainer.collector.grader = grader
            checkpoints = Checkpoints(layout.checkpoints, {"recipe": "r", "seed": 0}, keep=1)
            train(trainer, checkpoints, CheckpointSettings(1e9, 1), lambda *_: None)
    ledger = trainer.state.ledger
    for account in (ledger.executed, ledger.charged, ledger.charged_mixed, ledger.charged_paper):
        judged = account["score"] / FLOPS
        assert judged == int(judged)
        assert 1 <= judged <= 12
    assert ledger.executed["evaluate"] > FLOPS
    assert layout.judged.exists()
