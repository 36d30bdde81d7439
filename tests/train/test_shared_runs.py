"""Replay of groups in the records of finished runs."""

import json
import shutil
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from tasks.common.artifacts import TRAIN_ROLLOUTS
from tasks.common.files import ArtifactError
from tasks.common.recipes import input_digests
from tasks.train.loop.loop import learn
from tests.train.worlds import check_kills, make_trainer, make_world, run, sampled

SIZES = [4, 2, 6] * 6


@pytest.fixture
def finished(guesser: Path, tmp_path: Path) -> Path:
    layout = make_world(tmp_path / "other", guesser, SIZES)
    run(layout, {"learning_rate": 3e-3, "advantage": {"method": "rloo"}})
    return layout.train("r", 0)


def changes_of(*folders: Path, share: float = 0.5, **more: Any) -> dict[str, Any]:
    replay = {"method": "runs", "folders": [str(folder) for folder in folders], "share": share}
    return {"replay": replay, **more}


def test_groups_are_those_of_the_record(
    guesser: Path, finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of every batch has recorded outcomes, tokens and log-probabilities."""
    monkeypatch.setenv("HOME", str(finished.parent))
    record = TRAIN_ROLLOUTS.read(finished / "rollouts.parquet")
    groups = {
        tuple(map(tuple, rows["token_ids"].to_list())): (
            rows["prompt_id"][0],
            rows["reward"].to_list(),
            rows["sampler_logprobs"].explode().to_list(),
        )
        for _, rows in record.group_by("step", "group", maintain_order=True)
        if rows["outcome"].n_unique() > 1
    }
    trainer = make_trainer(make_world(tmp_path, guesser, SIZES), **changes_of(Path("~/train")))
    trainer.weights.load()
    seen = []
    with closing(trainer.collector.grader):
        for _ in range(4):
            batch = sampled(trainer)
            learn(trainer, batch)
            trainer.weights.load()
            seen.append((batch.num_replayed, len(batch.fresh.group_B)))
    assert {replayed for replayed, _ in seen} == {6}
    replayed = pl.concat(trainer.state.rollouts).filter("replayed")
    assert len(replayed)
    for _, rows in replayed.group_by("step", "group", maintain_order=True):
        found = groups[tuple(map(tuple, rows["token_ids"].to_list()))]
        assert found[0] == rows["prompt_id"][0]
        assert found[1] == rows["reward"].to_list()
        assert np.allclose(found[2], rows["sampler_logprobs"].explode().to_list(), atol=1e-6)
    fresh = sum(num for _, num in seen)
    ledger = trainer.state.ledger.as_dict()
    assert ledger["rollouts"]["generate"] == fresh
    assert ledger["rollouts"]["update"] == fresh + len(replayed)


def test_a_killed_run_replays_the_same_groups(
    guesser: Path, finished: Path, tmp_path: Path
) -> None:
    check_kills(tmp_path, guesser, SIZES, changes_of(finished))
    ledger_file = tmp_path / "whole" / "runs" / "r" / "0" / "train" / "flops.json"
    assert json.loads(ledger_file.read_text())["not_charged"] == [str(finished)]


def test_an_unsuitable_source_is_refused(
    guesser: Path, llama: Path, finished: Path, tmp_path: Path
) -> None:
    layout = make_world(tmp_path, guesser, SIZES)
    record = finished / "rollouts.parquet"
    rows = TRAIN_ROLLOUTS.read(record)
    TRAIN_ROLLOUTS.write(record, rows.with_columns(prompt_id=pl.lit("elsewhere")))
    with pytest.raises(ArtifactError, match=r"rollouts.parquet: no group of a training prompt"):
        make_trainer(layout, **changes_of(finished))
    with pytest.raises(ArtifactError, match="nowhere"):
        make_trainer(layout, **changes_of(tmp_path / "nowhere"))
    shutil.rmtree(finished / "policy")
    shutil.copytree(llama, finished / "policy")
    with pytest.raises(ArtifactError, match=r"train.replay.folders: the policy in .* has another"):
        make_trainer(layout, **changes_of(finished))


def test_a_cell_depends_on_the_record(finished: Path) -> None:
    train = {"replay": {"method": "runs", "folders": [str(finished)]}}
    before = input_digests(train)
    TRAIN_ROLLOUTS.write(
        finished / "rollouts.parquet", TRAIN_ROLLOUTS.read(finished / "rollouts.parquet").head(9)
    )
    assert len(before["inputs"][str(finished)]) == 16
    assert input_digests(train) != before
