"""Checkpoints on the disk: the choice at a restart, and the effects of `--resume`."""

import os
from concurrent.futures import Future
from contextlib import closing
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
import torch

from tasks.common.artifacts import TRAIN_ROLLOUTS
from tasks.common.checksums import read_checked
from tasks.common.files import ArtifactError, digest
from tasks.train.checkpoint.checkpoints import Checkpoints, Snapshot
from tasks.train.checkpoint.save import resume, write_results
from tasks.train.checkpoint.save import save as save_trainer
from tasks.train.checkpoint.tensors import SavedTensors
from tasks.train.loop.loop import train
from tasks.train.loop.state import TrainingError
from tasks.train.settings import CheckpointSettings
from tests.train.worlds import make_trainer, make_world, run_in_process

COMPONENTS = {"recipe": "r", "seed": 0}


def work_of(step: int) -> dict[str, float]:
    return {"seconds": 1.0 * step, "flops": 10.0 * step, "tokens": 100.0 * step}


def save(checkpoints: Checkpoints, step: int, branch: int) -> Path:
    """Save a checkpoint after `step` steps, with a part of rollouts for each; return its folder."""
    state = {"num_steps": step, "branch": None, "mark": branch, "work": work_of(step), "buffer": {}}
    rollouts = pl.DataFrame({"step": [step - 1], "branch": [branch]})
    tensors = {"policy.w": torch.full((2,), float(branch))}
    checkpoints.note_work(state["work"])
    checkpoints.save(Snapshot(step, tensors, {}, state, {}, rollouts))
    checkpoints.wait()
    return checkpoints.steps()[-1]


@pytest.fixture
def checkpoints(tmp_path: Path) -> Checkpoints:
    return Checkpoints(tmp_path, COMPONENTS, keep=2)


def state_of(checkpoints: Checkpoints, folder: Path | None = None) -> dict[str, Any]:
    loaded = checkpoints.load(folder)
    assert loaded is not None
    return loaded[1]


def branches(checkpoints: Checkpoints, folder: Path | None = None) -> tuple[int, list[int]]:
    """Return the branch of the loaded checkpoint, and of each part that it names."""
    state = state_of(checkpoints, folder)
    parent = checkpoints.folder if folder is None else folder.parent
    parts = [pl.read_parquet(parent / name) for name in checkpoints.parts]
    return state["mark"], [int(part["branch"][0]) for part in parts]


def test_a_chosen_older_checkpoint_becomes_the_newest(tmp_path: Path) -> None:
    first = Checkpoints(tmp_path, COMPONENTS, keep=2)
    older, _ = save(first, 1, branch=1), save(first, 2, branch=1)

    second = Checkpoints(tmp_path, COMPONENTS, keep=2)
    assert second.load(older) is not None
    second.branch_from(older)
    assert branches(second) == (1, [1])  # a restart would load this one
    assert second.count_lost(work_of(1)) == {"seconds": 0.0, "flops": 0.0, "tokens": 0.0}

    for step in (2, 3):
        save(second, step, branch=2)
        assert branches(second) == (2, [1] + [2] * (step - 1))
    assert len(second.steps()) == 2


def test_an_abandoned_checkpoint_can_be_resumed(checkpoints: Checkpoints) -> None:
    older, newer = save(checkpoints, 1, branch=1), save(checkpoints, 2, branch=1)
    checkpoints.load(older)
    checkpoints.branch_from(older)
    assert branches(checkpoints, newer) == (1, [1, 1])
    checkpoints.branch_from(newer)
    assert branches(checkpoints) == (1, [1, 1])
    save(checkpoints, 3, branch=1)
    assert branches(checkpoints) == (1, [1, 1, 1])


def test_a_checkpoint_of_other_code_is_copied_with_its_parts(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    other = Checkpoints(tmp_path / "other", COMPONENTS | {"code": "earlier"}, keep=2)
    _, chosen = save(other, 1, branch=1), save(other, 2, branch=1)
    checkpoints = Checkpoints(tmp_path / "mine", COMPONENTS | {"code": "later"}, keep=2)
    save(checkpoints, 1, branch=2)
    checkpoints.load(chosen)
    assert "its steps were made by other code" in caplog.text
    checkpoints.branch_from(chosen)
    other.delete()
    assert branches(checkpoints) == (1, [1, 1])


def test_the_newest_checkpoint_is_not_copied(checkpoints: Checkpoints) -> None:
    _, newest = save(checkpoints, 1, branch=1), save(checkpoints, 2, branch=1)
    (checkpoints.folder / "step-00000010bak").mkdir()  # a user's
    checkpoints.note_work(work_of(5))
    checkpoints.load(newest)
    checkpoints.branch_from(newest)
    assert checkpoints.steps()[-1] == newest
    assert checkpoints.count_lost(work_of(2)) == work_of(3)
    checkpoints.note_work(work_of(4))
    assert checkpoints.count_lost(work_of(2)) == work_of(5)  # the sum of both kills


def test_a_checkpoint_of_other_code_is_refused(guesser: Path, tmp_path: Path) -> None:
    layout = make_world(tmp_path, guesser, [4, 4, 4])
    checkpoints = Checkpoints(layout.checkpoints, COMPONENTS, keep=1)
    trainer = make_trainer(layout)
    save_trainer(trainer, checkpoints)
    checkpoints.wait()
    again = make_trainer(layout, replay={"method": "recent", "share": 0.5, "capacity": 4})
    other = trainer.queue.table().drop("kept")
    with closing(trainer.collector.grader), closing(again.collector.grader):
        with pytest.raises(ArtifactError, match=r"stored the state of methods \(method.replay"):
            resume(again, checkpoints, None)
        trainer.queue.table = lambda: other  # type: ignore[method-assign]
        save_trainer(trainer, checkpoints)
        checkpoints.wait()
        with pytest.raises(ArtifactError, match="is from other code, which stored rollouts"):
            resume(trainer, checkpoints, checkpoints.steps()[-1])


def test_a_snapshot_first_waits_for_the_previous_one(guesser: Path, tmp_path: Path) -> None:
    """Otherwise the rollouts would be in a part before the wait raises the error of the previous
    one."""
    trainer = make_trainer(make_world(tmp_path, guesser, [4, 4, 4]))
    trainer.state.rollouts = [TRAIN_ROLLOUTS.frame([TRAIN_ROLLOUTS.example])]
    checkpoints = Checkpoints(tmp_path / "checkpoints", COMPONENTS, keep=1)
    checkpoints.writing = Future()
    checkpoints.writing.set_exception(OSError("the disk is full"))
    with closing(trainer.collector.grader), pytest.raises(OSError, match="the disk is full"):
        save_trainer(trainer, checkpoints)
    assert len(trainer.state.rollouts) == 1
    assert checkpoints.parts == []


def flip(path: Path, place: int = -1) -> None:
    """Change one bit of a file."""
    content = bytearray(path.read_bytes())
    content[place] ^= 1
    path.write_bytes(content)


def test_the_steps_of_a_damaged_part_are_repeated(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = Checkpoints(tmp_path, COMPONENTS, keep=3)
    for step in (1, 2, 3):
        save(first, step, branch=1)
    damaged = first.folder / first.parts[1]
    flip(damaged)

    second = Checkpoints(tmp_path, COMPONENTS, keep=3)
    assert state_of(second)["num_steps"] == 1
    assert caplog.text.count(f"{damaged.name} was changed after it was written") == 2
    save(second, 2, branch=1)  # the same rollouts have the same name
    assert second.folder / second.parts[1] == damaged
    # this repairs the checkpoints from before the damage as well
    for folder in second.steps():
        assert second.load(folder) is not None


def test_a_damaged_part_of_all_checkpoints_restarts_the_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = Checkpoints(tmp_path, COMPONENTS, keep=2)
    for step in (1, 2, 3):
        save(first, step, branch=1)
    flip(first.folder / first.parts[0])

    second = Checkpoints(tmp_path, COMPONENTS, keep=2)
    assert second.load() is None
    assert second.parts == []
    assert "starting over from the first step, which gives the same outputs" in caplog.text
    save(second, 1, branch=2)
    caplog.clear()
    third = Checkpoints(tmp_path, COMPONENTS, keep=2)
    assert branches(third) == (2, [2])  # not the older checkpoint with a higher step
    assert not caplog.records


def test_results_are_not_written_if_a_part_is_damaged(guesser: Path, tmp_path: Path) -> None:
    """The damage occurs between the last checkpoint and the results."""
    layout = make_world(tmp_path, guesser, [4, 4, 4] * 4)
    trainer = make_trainer(layout)
    checkpoints = Checkpoints(layout.checkpoints, COMPONENTS, keep=3)
    with closing(trainer.collector.grader):
        train(trainer, checkpoints, CheckpointSettings(0.0, 3), lambda *_: None)
    flip(checkpoints.folder / checkpoints.parts[-1])
    out = layout.train("r", 0)
    with pytest.raises(TrainingError, match="run the same command again"):
        write_results(trainer, checkpoints, out)
    assert not (out / "rollouts.parquet").exists()


def test_the_record_of_a_run_does_not_depend_on_its_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tasks.train.checkpoint.checkpoints.ROWS", 16)
    rng, example = np.random.default_rng(0), TRAIN_ROLLOUTS.example
    rows = [
        {
            **example,
            "step": step,
            "token_ids": rng.integers(0, 99, rng.integers(0, 9)).tolist(),
            "sampler_logprobs": None if step % 7 == 0 else rng.random(3).tolist(),
            "is_action": None if step < 40 else [True, False],
            "versions": None if step % 5 else [step],
            "text": "x" * int(rng.integers(0, 50)),
        }
        for step in range(70)
    ]
    whole, contents = TRAIN_ROLLOUTS.frame(rows), set()
    for number in range(12):
        cuts = sorted(rng.choice(np.arange(1, 70), rng.integers(0, 20), replace=False).tolist())
        checkpoints = Checkpoints(tmp_path / str(number), COMPONENTS, keep=1)
        for first, end in pairwise([0, *cuts, 70]):
            checkpoints.parts.append(checkpoints.write_part(whole[first:end]))
        path = tmp_path / "rollouts.parquet"
        TRAIN_ROLLOUTS.write_parts(path, checkpoints.rollouts())
        assert TRAIN_ROLLOUTS.read(path).equals(whole)
        contents.add(path.read_bytes())
    assert len(contents) == 1
    checkpoints.parts = []
    TRAIN_ROLLOUTS.write_parts(path, checkpoints.rollouts())
    assert TRAIN_ROLLOUTS.read(path).equals(whole.clear())


def test_a_resumed_run_reads_every_tensor_once(
    guesser: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = make_world(tmp_path, guesser, [4, 4, 4])
    run_in_process(layout, {"max_steps": 1})
    names = list[str]()
    get = SavedTensors.__getitem__

    def get_and_note(tensors: SavedTensors, name: str) -> torch.Tensor:
        names.append(name)
        return get(tensors, name)

    monkeypatch.setattr(SavedTensors, "__getitem__", get_and_note)
    trainer = make_trainer(layout)
    with closing(trainer.collector.grader):
        resume(trainer, Checkpoints(layout.checkpoints, COMPONENTS, keep=1), None)
    assert trainer.state.num_steps == 1
    assert len(names) == len(set(names)) > 0


def test_a_part_is_deleted_with_its_last_checkpoint(checkpoints: Checkpoints) -> None:
    save(checkpoints, 1, branch=1)
    save(checkpoints, 2, branch=1)
    (oldest,) = [name for name in checkpoints.parts if "-000000001-" in name]
    checkpoints.load(checkpoints.steps()[0])
    save(checkpoints, 2, branch=2)
    assert (checkpoints.folder / oldest).exists()  # the previous checkpoint needs it
    save(checkpoints, 3, branch=2)
    assert not (checkpoints.folder / oldest).exists()
    kept = {path.name for path in checkpoints.folder.glob("rollouts-*")}
    assert kept == set(checkpoints.parts)


def test_a_chosen_damaged_checkpoint_is_refused(checkpoints: Checkpoints) -> None:
    chosen = save(checkpoints, 1, branch=1)
    flip(chosen / "tensors.safetensors")
    with pytest.raises(ArtifactError, match="tensors.safetensors was changed .*omit --resume"):
        checkpoints.load(chosen)
    (chosen / "tensors.safetensors").unlink()
    with pytest.raises(ArtifactError, match="tensors.safetensors is missing"):
        checkpoints.load(chosen)
    with pytest.raises(ArtifactError, match=r"--resume .*mine: restore the .* name"):
        checkpoints.load(chosen.rename(chosen.with_name("mine")))


def test_damaged_notes_are_ignored(
    checkpoints: Checkpoints, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    save(checkpoints, 1, branch=1)
    path = checkpoints.folder / "work.json"
    assert checkpoints.count_lost(work_of(0))["flops"] == 10.0
    path.write_text(path.read_text().replace("10.0", "90.0", 1))  # the earlier loss
    assert checkpoints.count_lost(work_of(0))["flops"] == 0.0
    assert "ignoring it" in caplog.text

    key = checkpoints.folder / "key.json"
    flip(key, key.read_text().index("r"))
    Checkpoints(
        tmp_path, {"recipe": "r", "seed": 1}, keep=2
    )  # another run states why it starts over
    assert "skipping the checkpoints in" in caplog.text
    again = Checkpoints(tmp_path, COMPONENTS, keep=2)
    assert read_checked(key) == COMPONENTS
    assert again.load() is not None


def test_a_branch_whose_trunk_is_damaged_is_not_resumed(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, COMPONENTS, keep=3)
    older, trunk = save(checkpoints, 1, branch=1), save(checkpoints, 2, branch=1)
    save_branch(checkpoints, 3)
    assert state_of(checkpoints)["branch"] == 0.5
    flip(trunk / "tensors.safetensors")
    state = state_of(checkpoints)
    assert (state["branch"], state["num_steps"]) == (None, 1)
    assert older in checkpoints.steps()


def save_branch(checkpoints: Checkpoints, step: int) -> Path:
    """Save a checkpoint of a branch that left the trunk after two steps."""
    state = {"num_steps": step, "branch": 0.5, "branch_start": 2, "buffer": {}}
    checkpoints.save(Snapshot(step, {"policy.w": torch.zeros(2)}, {}, state, {}, None))
    checkpoints.wait()
    return checkpoints.steps()[-1]


def test_a_branch_keeps_the_checkpoint_of_its_trunk(checkpoints: Checkpoints) -> None:
    """Both checkpoints of a branch can be chosen in turn."""
    save(checkpoints, 1, branch=1)
    save(checkpoints, 2, branch=1)
    for step in (3, 4, 5):
        last = save_branch(checkpoints, step)
    before = checkpoints.steps()[-2]
    assert steps_of(checkpoints) == [2, 4, 5]
    for folder in (before, last):
        assert checkpoints.load(folder) is not None
        checkpoints.branch_from(folder)
        assert state_of(checkpoints) == read_checked(folder / "state.json")["state"]
        assert checkpoints.trunk()[1]["num_steps"] == 2
    save_branch(checkpoints, 6)
    assert steps_of(checkpoints) == [2, 5, 6]
    save(checkpoints, 2, branch=1)  # the trunk continues
    assert steps_of(checkpoints) == [2, 2]


def steps_of(checkpoints: Checkpoints) -> list[int]:
    return [int(path.name.split("-")[1]) for path in checkpoints.steps()]


def test_two_runs_can_clean_up_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A starting run deletes the folder that a finished run is deleting."""
    ended = Checkpoints(tmp_path, COMPONENTS, keep=1)
    save(ended, 1, branch=1)
    rename = os.rename

    def rename_while_another_starts(source: Path, target: Path) -> None:
        rename(source, target)
        Checkpoints(tmp_path, {**COMPONENTS, "seed": 1}, keep=1)

    monkeypatch.setattr(os, "rename", rename_while_another_starts)
    ended.delete()
    assert [path.name for path in tmp_path.iterdir()] == [digest({**COMPONENTS, "seed": 1})]
