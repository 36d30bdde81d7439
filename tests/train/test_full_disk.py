"""Stages on a full disk: refused before the work if possible, else they fail with one sentence, and
the same command resumes when there is space again."""

import hashlib
import shutil
from pathlib import Path

import pytest

from tasks.common.files import digest_folder, write_json
from tasks.train.checkpoint import results
from tests.files import plant
from tests.full import largest_file, remount, small_disk
from tests.stages import Result, Started, run_stage
from tests.store.test_processes import make_root, stored_rows
from tests.train.worlds import make_world

SIZES = [4] * 12
LARGEST = 1_300_000  # bytes: above a policy's weights and MLflow's database, below a checkpoint's


def run_train(root: Path) -> Result:
    return run_stage("train", root / "params.yaml", root, "--recipe", "r", "--seed", "0")


def outputs(root: Path) -> str:
    """Return a digest of the outputs that must not depend on interruptions."""
    named = ("policy/*", "steps.parquet", "curve.parquet", "rollouts.parquet", "flops.json")
    return digest_folder(root / "runs" / "r" / "0" / "train", named)


def failure(result: Result) -> str:
    assert result.returncode == 1, result.output
    assert "Traceback" not in result.output
    return next(line for line in result.output.splitlines() if "run the same command" in line)


@pytest.fixture(scope="module")
def whole(guesser: Path, tmp_path_factory: pytest.TempPathFactory) -> str:
    root = tmp_path_factory.mktemp("whole")
    make_world(root, guesser, SIZES)
    assert run_train(root).returncode == 0
    return outputs(root)


@pytest.mark.slow
@pytest.mark.xdist_group("full_disk")
def test_training_resumes_after_a_checkpoint_that_could_not_be_written(
    guesser: Path, whole: str, tmp_path: Path
) -> None:
    root = make_world(tmp_path, guesser, SIZES).root
    with largest_file(LARGEST):
        sentence = failure(run_train(root))
    assert f"{root}/checkpoints/" in sentence
    assert "the file would be larger than a process may write" in sentence
    kept = [path.name for path in root.glob("checkpoints/*/*step-*")]
    assert kept == ["step-000000000-000001"]  # before the first update, without a partial one
    assert not (root / "runs" / "r" / "0" / "train").exists()
    assert run_train(root).returncode == 0
    assert outputs(root) == whole


@pytest.mark.slow
@pytest.mark.xdist_group("full_disk")
def test_a_full_disk_keeps_the_previous_checkpoint(
    guesser: Path, whole: str, tmp_path: Path
) -> None:
    with small_disk(tmp_path / "disk", 5 << 20) as place:
        make_world(place, guesser, SIZES)
        assert "the disk is full" in failure(run_train(place))
        kept = list(place.glob("checkpoints/*/step-*"))
        newest = max(int(path.name.split("-")[1]) for path in kept)
        remount(place, "size=40m")
        result = run_train(place)
        assert result.returncode == 0
        assert f"resumed after {newest} steps" in result.output
        assert outputs(place) == whole


@pytest.mark.parametrize("blocked", ["profile", "store", "locks"])
def test_a_stage_without_a_writable_folder_does_not_begin(
    blocked: str, guesser: Path, tmp_path: Path
) -> None:
    layout = make_root(tmp_path, guesser, None, range(4))
    (tmp_path / blocked).symlink_to(tmp_path / "unmounted")
    sentence = failure(run_stage("profile", tmp_path / "params.yaml", tmp_path))
    assert f"{tmp_path}/{blocked}: " in sentence
    (tmp_path / blocked).unlink()
    assert stored_rows(layout.store) == 0
    assert run_stage("profile", tmp_path / "params.yaml", tmp_path).returncode == 0


def test_a_store_elsewhere_is_checked_before_sampling(guesser: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    root = make_root(tmp_path / "data", guesser, str(tmp_path / "file" / "store"), range(4)).root
    result = run_stage("profile", root / "params.yaml", root)
    assert f"{tmp_path}/file/store/" in failure(result)
    assert "a part of this path is a file" in failure(result)


def test_finished_results_are_restored_until_dvc_has_recorded_them(tmp_path: Path) -> None:
    out, folder, lock = (tmp_path / name for name in ("out", "finished", "dvc.lock"))
    plant(out, {"curve.parquet": "curve", "policy/config.json": "{}"})
    results.keep(out, folder, "key")
    shutil.rmtree(out)  # as DVC does before it runs a stage
    assert results.restore(out, folder, "key", [lock])
    assert (out / "curve.parquet").read_text() == "curve"
    assert (out / "policy" / "config.json").read_text() == "{}"
    lock.write_text(f"outs: [{hashlib.md5(b'curve').hexdigest()}]")
    assert not results.restore(out, folder, "key", [lock])  # the stage must run again
    assert not folder.exists()


@pytest.mark.parametrize("fault", ["key", "results"])
def test_damaged_results_or_those_of_another_run_are_refused(fault: str, tmp_path: Path) -> None:
    out, folder = tmp_path / "out", tmp_path / "finished"
    plant(out, {"curve.parquet": "curve"})
    results.keep(out, folder, "other" if fault == "key" else "key")
    shutil.rmtree(out)
    if fault == "results":
        (folder / "results" / "curve.parquet").write_text("curse")
    assert not results.restore(out, folder, "key", [])
    assert not out.exists()
    assert not folder.exists()


@pytest.mark.slow
@pytest.mark.xdist_group("full_disk")
def test_training_whose_inputs_changed_keeps_nothing_to_restore(
    guesser: Path, whole: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = make_world(tmp_path, guesser, SIZES)
    write_json(layout.code("train", "r"), {"files": {}, "versions": {}})
    shutil.copy(tmp_path / "params.yaml", layout.code_params)
    settings = layout.code("train", "r").with_suffix(".params.yaml")
    settings.write_text("{}")
    monkeypatch.setenv("DVC_STAGE", "train@r-0")
    for written, status in ((["tracking/mlflow.db"], 1), ([], 0)):  # which the stage itself writes
        deps = [str(tmp_path / name) for name in written]
        entry = {"deps": deps, "params": [{str(settings): None}]}
        write_json(tmp_path / "dvc.yaml", {"stages": {"train": entry}})
        result = run_train(tmp_path)
        assert result.returncode == status, result.output
        assert ("mlflow.db changed while the stage ran" in result.output) is bool(status)
        assert "resumed after" not in result.output
        assert list(layout.checkpoints.glob("*/step-*")) == []
    assert outputs(tmp_path) == whole


@pytest.mark.slow
@pytest.mark.usefixtures("forked_stages")
def test_a_run_that_dvc_could_not_record_is_not_trained_again(
    guesser: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = make_world(tmp_path, guesser, SIZES)
    coordinates = ("--recipe", "r", "--seed", "0")
    monkeypatch.setenv("DVC_STAGE", "train@r-0")
    first = Started("train", tmp_path / "params.yaml", tmp_path, *coordinates)
    log = first.finish()
    assert first.returncode == 0, log
    before = outputs(tmp_path)
    shutil.rmtree(layout.train("r", 0))
    again = Started("train", tmp_path / "params.yaml", tmp_path, *coordinates)
    log = again.finish()
    assert again.returncode == 0, log
    assert "restoring its results" in log
    assert "validation accuracy" not in log
    assert outputs(tmp_path) == before
    monkeypatch.delenv("DVC_STAGE")
    result = run_stage("evaluate", tmp_path / "params.yaml", tmp_path, *coordinates)
    assert result.returncode == 0, result.output
    assert not layout.unrecorded("r", 0).exists()
