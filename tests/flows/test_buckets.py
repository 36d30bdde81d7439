"""Outputs are shared through a bucket: after `dvc push`, a clone and `dvc pull`, no stage runs."""

import shutil
from pathlib import Path

import pytest

from tests.flows.project import Project, shell
from tests.s3_server import ACCESS_KEY, SECRET_KEY, S3Server


@pytest.mark.s3
def test_clone_pulls_pushed_outputs(
    tmp_path: Path, finished: Path, environment: dict[str, str], s3: S3Server, bucket: str
) -> None:
    first = Project(tmp_path / "first", {**environment, **s3.environment()})
    shutil.copytree(finished, first.root, symlinks=True)
    # the only setting that a project needs
    first.dvc("remote", "add", "--default", "team", f"{bucket}/dvc")
    shell(first.root, first.environment, "git", "commit", "--quiet", "--all", "--message", "remote")
    first.dvc("push")
    clone = Project(tmp_path / "clone", first.environment)
    shell(tmp_path, first.environment, "git", "clone", "--quiet", str(first.root), str(clone.root))
    assert not (clone.root / "data" / "report" / "leaderboard.json").exists()
    clone.dvc("pull")
    assert clone.status() == {}
    report = Path("data/report/leaderboard.json")
    assert (clone.root / report).read_bytes() == (first.root / report).read_bytes()
    for project in (first, clone):
        written = [path.read_bytes() for path in project.root.rglob("*") if path.is_file()]
        keys = (ACCESS_KEY.encode(), SECRET_KEY.encode())
        assert not any(key in content for content in written for key in keys)
