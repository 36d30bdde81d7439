"""The inputs of a stage: which changes of files, code, libraries and folders are found."""

import os
from pathlib import Path

import pytest

from tasks.common import inputs
from tasks.common.files import ArtifactError, digest_folder, write_json, write_text
from tasks.common.inputs import Inputs
from tasks.common.layout import Layout

PIPELINE = """\
stages:
  train:
    deps: [code/${item.recipe}/train.json, prompts, runs/${item.recipe}/${item.seed}/plan]
    params: [{code/${item.recipe}/train.params.yaml: }]
"""
CODE, TABLE, PLAN = "tasks/a.py", "prompts/train.parquet", "runs/r/0/plan/plan.parquet"


@pytest.fixture
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a data root whose dvc.yaml has relative paths, and whose code is in it, too."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(inputs, "ROOT", tmp_path)
    write_text(tmp_path / "dvc.yaml", PIPELINE)
    for name in (TABLE, PLAN, "teacher/model", "prompts/__pycache__/x.pyc"):
        write_text(tmp_path / name, "first")
    write_text(tmp_path / CODE, "A = 1\n")
    recorded = {
        "files": {CODE: inputs.code_digest(tmp_path / CODE, None)},
        "versions": {"torch": "2.13.0"},
    }
    write_json(tmp_path / "code/r/train.json", recorded)
    teacher = digest_folder(tmp_path / "teacher", ("*",))
    write_text(tmp_path / "code/r/train.params.yaml", f"inputs: {{teacher: {teacher}}}\n")
    return tmp_path


def start() -> Inputs:
    return Inputs.at_start(Layout(Path()), "train", "r", 0)


def test_what_does_not_change_an_input(root: Path) -> None:
    found = start()
    os.utime(TABLE)
    write_text(root / PLAN, "first")
    write_text(root / "prompts/__pycache__/x.pyc", "second")
    write_text(root / CODE, "A = 1  # a comment\n")
    assert inputs.changed(found.marks, inputs.marks_of(found.paths)) == []
    assert found.changed_since_code() == []
    found.check()


@pytest.mark.parametrize("path", [TABLE, PLAN, "prompts/new", "code/r/train.params.yaml"])
def test_a_changed_file_is_named(root: Path, path: str) -> None:
    found = start()
    write_text(root / path, "inputs: {}")
    with pytest.raises(ArtifactError, match=f"^{path} changed while the stage ran: its outputs"):
        found.check()
    start()


def test_a_missing_file_and_a_replaced_large_file_are_changes(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = start()
    (root / TABLE).unlink()
    with pytest.raises(ArtifactError, match=TABLE):
        found.check()
    monkeypatch.setattr(inputs, "LARGE", 4)
    found = start()
    write_text(root / PLAN, "first")
    with pytest.raises(ArtifactError, match=PLAN):
        found.check()


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda root: write_text(root / CODE, "A = -1\n"), CODE),
        (lambda root: write_text(root / CODE, "A = (\n"), CODE),
        (lambda root: (root / CODE).unlink(), CODE),
        (lambda root: write_text(root / "teacher/model", "second"), "teacher"),
    ],
)  # fmt: skip
def test_code_and_folders_are_compared_with_the_record_of_code(
    root: Path, change: object, named: str
) -> None:
    found = start()
    change(root)  # type: ignore[operator]
    with pytest.raises(ArtifactError, match=f"^{named} changed while"):
        found.check()
    with pytest.raises(ArtifactError, match=f"^{named} changed after the stage code"):
        start()


def test_a_library_upgraded_during_the_run_is_named(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = start()
    write_text(root / "torch-2.99.0.dist-info/METADATA", "Name: torch\nVersion: 2.99.0\n")
    monkeypatch.syspath_prepend(root)
    with pytest.raises(ArtifactError, match="the version of torch changed while the stage ran"):
        found.check()


def test_the_note_saves_parsing_only_for_the_same_bytes(root: Path) -> None:
    content = inputs.hexdigest((root / CODE).read_bytes())
    assert inputs.code_digest(root / CODE, [content, "as noted"]) == "as noted"
    assert inputs.code_digest(root / CODE, ["0" * 16, "as noted"]) not in ("as noted", None)


def test_a_stage_reads_the_copy_of_its_parameters_under_dvc_alone(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout, named = Layout(root), root / "params.yaml"
    write_text(layout.code_params, "{}")
    assert inputs.params_file(layout, named) == named
    monkeypatch.setenv("DVC_STAGE", "train@r-0")
    assert inputs.params_file(layout, named) == layout.code_params
