"""The report's files for `dvc metrics` and `dvc plots`, read by DVC in a fresh clone of a project
with the real dvc.yaml."""

import os
import re
import shutil
import sys
from pathlib import Path

import pytest

from tasks.common.artifacts import Layout
from tasks.common.files import read_json
from tests.files import commit_all, copy_project
from tests.flows.project import shell
from tests.report.conftest import run_report

COPIED = ("dvc.yaml", ".dvcignore", ".gitignore", ".dvc/config", ".dvc/.gitignore")
ACCOUNTS = ["charged", "charged_mixed", "executed"]
COLUMNS = [*ACCOUNTS, "greedy", "pass@1", "recipe", "seed", "val"]


def run(folder: Path, *command: str) -> str:
    return shell(folder, {**os.environ, "DVC_NO_ANALYTICS": "1"}, *command)


def dvc(folder: Path, *arguments: str) -> str:
    return run(folder, sys.executable, "-m", "dvc", *arguments)


@pytest.fixture(scope="module")
def clone(reported: Layout, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a clone of a project that was committed after a report over grpo and sgpo."""
    folder = tmp_path_factory.mktemp("dvc")
    project = copy_project(folder / "project", *COPIED, "params.yaml", "data/.gitignore")
    shutil.copytree(reported.root, project / "data", dirs_exist_ok=True)
    commit_all(project)
    run(folder, "git", "clone", "--quiet", str(project), "clone")
    return folder / "clone"


def test_a_fresh_clone_shows_the_metrics_as_one_narrow_table(clone: Path) -> None:
    head, *rows = dvc(clone, "metrics", "show").splitlines()
    assert head.split() == ["Path", *COLUMNS]
    assert [" ".join(row.split()) for row in rows[2:]] == [
        "data/report/metrics/sgpo/0.json 400.0 340.0 280.0 0.53 0.51 sgpo 0 0.55",
        "data/report/metrics/sgpo/1.json 400.0 340.0 280.0 0.57 0.55 sgpo 1 0.57",
    ]
    assert max(map(len, [head, *rows])) <= 120


def test_a_removed_cell_is_not_in_the_table(copied: Layout) -> None:
    run_report(copied, recipes=["sgpo"], seeds=[0])
    found = sorted((copied.report / "metrics").rglob("*.json"))
    assert [path.parent.name for path in found] == ["sgpo"]
    assert read_json(found[0])["charged"] == 400.0


def test_plots_are_shown_without_a_network(clone: Path) -> None:
    dvc(clone, "plots", "show")
    page = (clone / "dvc_plots" / "index.html").read_text()
    pictures = sorted((clone / "dvc_plots" / "static").iterdir())
    assert len(pictures) == 4
    assert all(picture.name in page for picture in pictures)
    assert "//" not in page
    for picture in pictures:
        drawn = re.sub(r'xmlns(:xlink)?="[^"]*"', "", picture.read_text())
        assert "//" not in drawn
        assert ">grpo<" in drawn
        assert "validation accuracy" in drawn
        assert ">sgpo</text>" in drawn
    assert run(clone, "git", "status", "--porcelain") == ""
