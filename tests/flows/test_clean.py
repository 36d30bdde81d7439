"""`winnow clean` removes what is old and not referenced, and nothing else."""

import itertools
import json
import os
import shutil
import sqlite3
import subprocess
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import pytest
import yaml

from flows.__main__ import parser_of
from flows.pipeline import commands, lock
from flows.pipeline.roots import Root
from flows.upkeep import clean, places
from tasks.common.files import ArtifactError, digest_file
from tasks.common.processes import locks
from tests.files import commit_all
from tests.flows.project import Project
from tests.patience import PATIENCE

DAYS = 86_400
Make = Callable[..., Path]


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty project under git."""
    monkeypatch.setattr(commands, "ROOT", tmp_path)
    monkeypatch.setenv("PREFECT_HOME", str(tmp_path / "prefect"))
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    (tmp_path / ".dvc").mkdir()
    (tmp_path / "params.yaml").write_text("store: {}\n")
    git(tmp_path, "init", "--quiet", "--initial-branch=main")
    return tmp_path


def git(root: Path, *arguments: str) -> None:
    who = ("-c", "user.name=x", "-c", "user.email=x@example.com")
    subprocess.run(["git", *who, *arguments], cwd=root, check=True)


def make(path: Path, days: float, text: str = "x") -> Path:
    """Write a file that is `days` days old."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    os.utime(path, (time.time() - days * DAYS,) * 2)
    return path


def entry(*digits: str) -> str:
    outs = [{"path": "a", "md5": digit * 32 + ".dir" * (digit == "d")} for digit in digits]
    return yaml.safe_dump({"stages": {"train@grpo-0": {"deps": [], "outs": outs}}})


def found(root: Path, days: float = 30) -> dict[str, places.Place]:
    return {one.name: one for one in places.examine(time.time() - days * DAYS)}


def test_objects_of_dvc_stay_if_a_lock_a_ref_a_push_or_a_young_run_names_them(root: Path) -> None:
    cache = root / ".dvc/cache"
    for digit in "0123456789abc":
        make(cache / "files/md5" / (digit * 2) / (digit * 30), 40)
    (tree := cache / "files/md5/dd").mkdir()
    make(tree / ("d" * 30 + ".dir"), 40, json.dumps([{"md5": "3" * 32, "relpath": "x"}]))
    make(cache / "files/md5/ee" / ("e" * 30), 20)
    file = root / "dvc.lock"
    file.write_text(entry("0"))
    git(root, "add", "dvc.lock")
    git(root, "commit", "--quiet", "--message=on a branch")
    git(root, "checkout", "--quiet", "-b", "other")
    file.write_text(entry("1"))
    git(root, "commit", "--quiet", "--all", "--message=superseded")
    file.write_text(entry("2"))
    git(root, "commit", "--quiet", "--all", "--message=head")
    file.write_text(entry("4"))
    for path in ("policy.json", "curve.parquet", "flops.json"):
        make(root / "data/runs/grpo/0/train" / path, 0, '{"digest": "published"}')
    places.note_pushed(Root(), "grpo", 0)
    file.write_text(entry("d"))
    make(root / "model.dvc", 0, f"outs:\n- md5: {'5' * 32}\n")
    young = make(cache / "runs/aa/aaaa/1", 20, entry("6", "7"))
    named = make(cache / "runs/aa/aaaa/2", 40, entry("d", "2"))
    old = make(cache / "runs/bb/bbbb/3", 40, entry("8", "d"))

    shown = found(root)
    assert (shown["cache"].num, shown["cache"].size) == (6, 6)  # 1 and 8 to c
    assert (shown["run cache"].num, shown["run cache"].size) == (1, old.stat().st_size)
    for place in shown.values():
        place.remove()
    left = {path.parent.name[0] for path in (cache / "files/md5").glob("*/*")}
    assert "".join(sorted(left)) == "0234567de"
    assert (young.exists(), named.exists(), old.parent.exists()) == (True, True, False)
    assert found(root)["cache"].num == 0

    file.write_text("<<<<<<< a\n")
    with pytest.raises(lock.LockError, match="git checkout HEAD"):
        found(root)
    file.write_text(entry("d"))
    (root / ".git/refs/heads/main").write_text(f"{'1' * 40}\n")  # its commit is lost
    with pytest.raises(ArtifactError, match="git .* failed"):
        found(root)


def test_cache_that_other_projects_may_share_is_left_alone(root: Path) -> None:
    make(root.parent / "shared/files/md5/aa" / ("a" * 30), 40)
    (root / ".dvc/config").write_text("[cache]\n    dir = ../../shared\n")
    assert found(root, 0)["cache"].num == 0


def test_checkpoints_logs_and_rollouts_of_unknown_policies_are_removed_by_age(root: Path) -> None:
    data = root / "data"
    make(data / "policy.json", 99, '{"digest": "initial"}')
    make(data / "rounds/2/dvc.yaml", 0)
    make(data / "rounds/2/runs/grpo/0/train/policy.json", 99, '{"digest": "second"}')
    make(
        data / "pushed/grpo-0-published.json",
        99,
        '{"policy": "published", "stages": []}',
    )
    kept = [make(data / "store" / name / "s/1", 40) for name in ("initial", "second", "published")]
    kept += [make(data / "store/young/s/1", 20), make(data / "rounds/2/logs/train/a.log", 20)]
    kept += [
        make(data / "checkpoints/a/key.json", 20),
        make(data / "checkpoints/finished/b/0/x", 1),
    ]
    kept += [make(data / "checkpoints/policy.safetensors", 1)]
    make(data / "checkpoints/a/old", 40)
    gone = [make(data / "store/former/s/1", 40), make(data / "logs/train/a.log", 40)]
    gone += [
        make(data / "checkpoints/c/key.json", 40),
        make(data / "checkpoints/finished/b/1/x", 40),
    ]
    shown = found(root)
    assert [shown[name].num for name in ("checkpoints", "store", "logs")] == [2, 1, 1]
    for place in shown.values():
        place.remove()
    assert all(path.exists() for path in kept)
    assert not any(path.exists() for path in gone)


def test_runs_of_current_files_and_of_the_champion_stay_in_mlflow(root: Path) -> None:
    from mlflow import MlflowClient

    tracking = root / "data/tracking"
    tracking.mkdir(parents=True)
    client = MlflowClient(f"sqlite:///{tracking / 'mlflow.db'}")
    experiment = client.create_experiment("winnow", (tracking / "artifacts").as_uri())
    discarded = client.create_experiment("discarded", (tracking / "artifacts").as_uri())
    client.create_run(discarded)
    client.delete_experiment(discarded)
    curve = make(root / "data/runs/grpo/0/train/curve.parquet", 0)
    (root / "dvc.lock").write_text(entry("a"))

    def run(name: str, days: float, parent: str | None = None, **tags: str) -> str:
        start = int((time.time() - days * DAYS) * 1000) + next(later)
        above = {"mlflow.parentRunId": parent} if parent else {}
        made = client.create_run(experiment, start, {**above, **tags}, name).info.run_id
        client.log_text(made, "text", "a.txt")
        return str(made)

    def trained(name: str, parent: str | None, **tags: str) -> str:
        made = run(name, 40, parent, **tags)
        client.set_terminated(made)
        model = client.create_logged_model(experiment, name, made)
        make(Path(model.artifact_location.removeprefix("file://")) / "weights", 40)
        source = model.artifact_location
        client.create_model_version("winnow", source, made, model_id=model.model_id)
        return made

    later = itertools.count()
    client.create_registered_model("winnow")
    pipeline, other = run("pipeline", 40), run("other pipeline", 40)
    for made in (pipeline, other):
        client.set_terminated(made)
    wrote = {"digest.output.runs/grpo/0/train/curve.parquet": digest_file(curve)}
    same = trained("same files, superseded", None, **wrote)
    current = trained("current", pipeline, **wrote)
    champion = trained("champion", None)
    client.set_registered_model_alias("winnow", "champion", "3")
    pushed = trained("pushed", None)
    note = {"policy": "published", "stages": []}
    make(root / "data/pushed/grpo-0-published.json", 0, json.dumps(note))
    (model,) = client.search_logged_models([experiment], f"source_run_id = '{pushed}'")
    client.set_logged_model_tags(model.model_id, {"digest": "published"})
    old = trained("old", other, **{next(iter(wrote)): "another"})
    going = run("still running", 40)
    young = run("young", 20)
    client.set_terminated(young)
    before = (tracking / "mlflow.db").stat().st_size
    shown = found(root)["tracking"]
    assert shown.num == 3
    assert shown.size == 3 * 4 + 2 * 1  # texts and weights
    shown.remove()
    left = {one.info.run_id for one in client.search_runs([experiment])}
    assert left == {pipeline, current, champion, pushed, going, young}
    assert {one.version for one in client.search_model_versions()} == {2, 3, 4}
    assert len(list((tracking / "artifacts").glob("models/*"))) == 3
    assert not [one for one in (old, same) if (tracking / "artifacts" / one).exists()]
    client.restore_experiment(discarded)  # only hidden, not purged
    assert (tracking / "mlflow.db").stat().st_size <= before
    (root / "params.yaml").write_text("tracking: {uri: 'http://127.0.0.1:1'}\n")
    assert found(root, 0)["tracking"].num == 0


def test_copy_of_a_project_leaves_the_record_of_the_original(root: Path) -> None:
    from mlflow import MlflowClient

    tracking = root / "original/data/tracking"
    tracking.mkdir(parents=True)
    client = MlflowClient(f"sqlite:///{tracking / 'mlflow.db'}")
    experiment = client.create_experiment("winnow", (tracking / "artifacts").as_uri())
    run = client.create_run(experiment, 1).info.run_id
    client.log_text(run, "text", "a.txt")
    client.set_terminated(run)
    shutil.copytree(tracking, root / "data/tracking")
    shown = found(root)["tracking"]
    shown.remove()
    assert (shown.num, (root / "data/tracking/artifacts" / run).exists()) == (1, False)
    assert (tracking / "artifacts" / run / "artifacts/a.txt").exists()


def test_running_dvc_stops_the_command(root: Path) -> None:
    notes = make(root / ".dvc/tmp/rwlock", 0, json.dumps({"write": {"a": {"pid": os.getpid()}}}))
    options = parser_of("clean").parse_args(["clean", "--yes"])
    with pytest.raises(commands.CommandError, match=f"dvc runs a stage .process {os.getpid()}"):
        clean.run(options)
    notes.write_text('{"write": {"a": {"pid": 4194305}}}')  # above the largest
    assert clean.run(options) == 0


def test_project_is_complete_after_everything_unreferenced_is_removed(
    project: Project, tmp_path: Path
) -> None:
    project.environment["PREFECT_HOME"] = str(tmp_path / "prefect")
    project.edit("params.yaml", r"^  passes: 4", "  passes: 5")
    project.flow()
    commit_all(project.root)  # no lock names the former state any more
    home = Path(project.environment["PREFECT_LOCAL_STORAGE_PATH"]).parent
    (tmp_path / "prefect").mkdir(exist_ok=True)
    with (
        closing(sqlite3.connect(home / "prefect.db")) as source,
        closing(sqlite3.connect(tmp_path / "prefect/prefect.db")) as copy,
    ):
        source.backup(copy)
    alone = project.without_server()
    objects = len(list((project.root / ".dvc/cache/files/md5").glob("*/*")))
    with locks.exclusive(project.root / "data/locks/pipeline", "the pipeline"):
        waiting = alone.start("flows", "clean", "--days", "0")
        assert waiting.stdout is not None
        assert waiting.stdout.readline().startswith("waiting for the pipeline")
    shown = waiting.communicate(timeout=PATIENCE)[0]
    assert "nothing was removed" in shown
    assert len(list((project.root / ".dvc/cache/files/md5").glob("*/*"))) == objects
    alone.winnow("clean", "--days", "0", "--yes")
    assert len(list((project.root / ".dvc/cache/files/md5").glob("*/*"))) < objects
    with closing(sqlite3.connect(tmp_path / "prefect/prefect.db")) as database:
        for table in ("flow_run", "task_run", "flow_run_state", "task_run_state", "log"):
            assert database.execute(f"SELECT count(*) FROM {table}").fetchone() == (0,)
        assert database.execute("PRAGMA foreign_key_check").fetchall() == []
    for folder in ("runs", "profile", "baseline", "prompts"):
        shutil.rmtree(project.root / "data" / folder)
    project.dvc("checkout")
    assert "nothing to do" in alone.flow()
