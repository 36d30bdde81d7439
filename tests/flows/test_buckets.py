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
    mine = Project(tmp_path / "mine", {**environment, **s3.environment()})
    shutil.copytree(finished, mine.root, symlinks=True)
    mine.dvc(
        "remote", "add", "--default", "team", f"{bucket}/dvc"
    )  # the only setting that a project needs
    shell(mine.root, mine.environment, "git", "commit", "--quiet", "--all", "--message", "remote")
    mine.dvc("push")
    theirs = Project(tmp_path / "theirs", mine.environment)
    shell(tmp_path, mine.environment, "git", "clone", "--quiet", str(mine.root), str(theirs.root))
    assert not (theirs.root / "data" / "report" / "leaderboard.json").exists()
    theirs.dvc("pull")
    assert theirs.status() == {}
    report = Path("data/report/leaderboard.json")
    assert (theirs.root / report).read_bytes() == (mine.root / report).read_bytes()
    for project in (mine, theirs):
        written = [path.read_bytes() for path in project.root.rglob("*") if path.is_file()]
        assert not any(
            key.encode() in content for content in written for key in (ACCESS_KEY, SECRET_KEY)
        )
