"""Data roots: refused names, a second root of the scratch project, and a loop over several."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from flows.__main__ import parser_of
from flows.cli import flags
from flows.pipeline import commands, flow, roots
from flows.pipeline.request import FlowRequest
from flows.pipeline.roots import Root, root_of
from flows.pipeline.selection import SelectionError
from flows.pipeline.stages import StageFailed, Stages, forced_of
from tasks.common.params import ParamsError
from tests.flows.project import ROOT, Project, shell
from tests.patience import PATIENCE


@pytest.mark.parametrize("folder", ["../other", "data/other", "data/rounds/2"])
def test_folder_below_another_is_no_data_root(folder: str) -> None:
    with pytest.raises(ParamsError, match="a data root is a folder at the top of the project"):
        root_of(folder)


def test_cells_behind_a_changed_stage_are_refused_if_left_out() -> None:
    needs = {"allocate@a-0": set(), "train@a-0": {"allocate@a-0"}, "report": {"train@a-0"}}
    dvc: Any = SimpleNamespace(status=lambda _: {"allocate@a-0": ["changed deps"]})
    stages = Stages(dvc, Root(), needs, ["report"], ["allocate@a-0", "train@a-0"], {}, {"report"})
    with pytest.raises(StageFailed, match="out of date and left out: allocate@a-0; run all"):
        stages.bring_up_to_date("report", dvc)


def test_file_is_no_data_root() -> None:
    with pytest.raises(ParamsError, match="LICENSE is a file: use a new folder with --data"):
        roots.prepare(Root("LICENSE"))


def test_folder_with_parameters_becomes_a_data_root(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(commands, "ROOT", tmp_path)
    shutil.copy(ROOT / "dvc.yaml", tmp_path)
    (tmp_path / "other").mkdir()
    with pytest.raises(ParamsError, match="other is not a data root"):
        roots.existing("other")
    (tmp_path / "other" / "params.yaml").write_text("policy: {source: tiny}\n")
    assert roots.existing("other") == Root("other")
    assert (tmp_path / "other" / "dvc.yaml").exists()


def test_command_line_is_a_request() -> None:
    words = ["run", "grpo", "--seed", "0", "1", "--data", "other", "--set", "a.b=1", "~c"]
    parsed = flags.request_of(parser_of("run").parse_args(words))
    assert parsed == FlowRequest(["grpo"], [0, 1], [], ["a.b=1", "~c"], "other")
    flow.pipeline.validate_parameters(vars(parsed))


def test_unknown_stage_is_not_forced() -> None:
    needs: dict[str, set[str]] = {"profile": set(), "report": {"profile"}}
    assert forced_of(needs, ["profile"]) == {"profile"}
    with pytest.raises(SelectionError, match="stage profil is not in the experiment"):
        forced_of(needs, ["profil", "profile"])


def test_stages_have_their_own_names_in_every_root() -> None:
    other = root_of("./other/")
    assert other == Root("other")
    assert other.titled("profile") == "other: profile"
    # the last is of a round that an earlier version of Winnow made
    addresses = ["profile", "other/dvc.yaml:profile", "data/rounds/2/dvc.yaml:profile"]
    assert other.own(addresses) == {other.address("profile"): "profile"}
    assert Root().own(addresses) == {"profile": "profile"}


def test_new_data_root_gets_its_own_parameters(project: Project) -> None:
    project.behave(**{"other/dvc.yaml:ingest": "fail"})
    output = project.flow("grpo", "--data", "other", expect=1)
    assert "other: policy: ran" in output
    assert "other: train@grpo-0: not run" in output
    assert "`winnow run --data other --until ingest`" in output
    assert (project.root / "other/params.yaml").read_text() == (
        project.root / "params.yaml"
    ).read_text()
    assert project.status().keys() >= {"other/dvc.yaml:ingest"}
    assert not any(":" not in stage for stage in project.status())  # no stage of the first root
    assert "flows contains other files" in project.flow("--data", "flows", expect=1)
    assert "profile  " in project.winnow("plan", "--data", "other")
    command = ["git", "ls-files", "--others", "--exclude-standard"]
    files = (".gitignore", "dvc.lock", "dvc.yaml", "params.yaml")
    visible = shell(project.root, project.environment, *command).split()
    assert {f"other/{name}" for name in files} <= {*visible} - {"behaviour.json"}


@pytest.mark.slow
def test_example_trains_every_root_from_the_policy_of_the_one_before(
    project: Project, tmp_path: Path
) -> None:
    project.edit("params.yaml", "recipes: \\[grpo, sgpo, winnow", "recipes: [sgpo")  # few stages
    command = tmp_path / "bin" / "winnow"
    command.parent.mkdir()
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -m flows "$@" --until train\n')
    command.chmod(0o755)
    path = f"{command.parent}{os.pathsep}{project.environment['PATH']}"
    script = [str(ROOT / "examples" / "rounds.sh")]
    options = {**project.options(), "env": {**project.environment, "PATH": path}}
    done = subprocess.run(script, timeout=PATIENCE, **options)
    assert done.returncode == 0, done.stdout
    before = (project.root / "params.yaml").read_text()
    for last, root in (("data", "round2"), ("round2", "round3")):
        ran = re.findall(rf"^\[\d+/\d+\] {root}: (\S+): ran", done.stdout, re.MULTILINE)
        assert {*ran} == {"code", "ingest", "policy", "profile", "allocate@sgpo-0", "train@sgpo-0"}
        settings = yaml.safe_load((project.root / root / "code/policy.params.yaml").read_text())
        assert settings["policy"]["source"] == f"{last}/runs/sgpo/0/train/policy"
        assert (project.root / root / "params.yaml").read_text() == before
