"""The recipes of the experiment are set in params.yaml, and the rest of it is unchanged."""

import argparse
import shutil
from pathlib import Path

import pytest

from flows.cli.recipes import run, what
from flows.pipeline import commands, roots
from flows.pipeline.request import set_recipes
from tasks.common import params, recipes
from tasks.common.params import ParamsError
from tests.flows.project import ROOT


@pytest.fixture
def path(tmp_path: Path) -> Path:
    shutil.copy(ROOT / "params.yaml", tmp_path)
    return tmp_path / "params.yaml"


def test_set_recipes_changes_only_the_recipes(path: Path) -> None:
    before = path.read_text().splitlines()
    set_recipes(path, ["pods", "grpo", "sagc", "pods"])
    after = path.read_text().splitlines()
    assert params.load(path)["experiment"]["recipes"] == ["pods", "grpo", "sagc"]
    changed = [(old, new) for old, new in zip(before, after, strict=True) if old != new]
    assert len(changed) == 1
    assert changed[0][0].split("#")[1] == changed[0][1].split("#")[1]  # its comment stays


def test_all_excludes_recipes_of_missing_folders(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "ROOT", path.parent)
    set_recipes(path, ["all"])
    found, all_names = params.load(path)["experiment"]["recipes"], recipes.names(params.load(path))
    assert found == [name for name in all_names if name != "distil"]
    (path.parent / "teacher").mkdir()
    set_recipes(path, ["all"])
    assert params.load(path)["experiment"]["recipes"] == all_names


def test_unknown_recipe_is_refused(path: Path) -> None:
    before = path.read_text()
    with pytest.raises(ParamsError, match="recipe 'pod' is unknown"):
        set_recipes(path, ["grpo", "pod"])
    assert path.read_text() == before


def test_recipe_of_the_parameters_has_no_description() -> None:
    assert what({}, "sgpo").endswith("arXiv 2606.08854")
    assert what({"recipes": {"sgpo": {"from": "grpo"}}}, "sgpo") == "of params.yaml"


def test_ablations_are_listed_apart(capsys: pytest.CaptureFixture[str]) -> None:
    run(argparse.Namespace(name=None, data=roots.MAIN))
    first, second = capsys.readouterr().out.split("\nablations: ")
    assert "\nsgpo " in first
    assert "\nsgpo_fixed " in second
    assert "sgpo_fixed" not in first
