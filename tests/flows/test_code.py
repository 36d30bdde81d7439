"""The stage `code` in the pipeline: the stages that an edit repeats, the messages about it, and the
agreement of the flow and `dvc repro`. `tests/code/test_cells.py` tests the cells of an edit."""

import pytest

from tests.flows.project import Project, lines
from tests.flows.test_pipeline import task_runs

TRAINING = ["train@grpo-0", "train@sgpo-0", "train@winnow-0"]
CLIP = "tasks/train/methods/loss/clip.py"


def test_comment_and_unused_method_run_only_code(project: Project) -> None:
    project.edit(CLIP, r"\Z", "# a comment\n")
    (project.root / "tasks/train/methods/select/new.py").write_text("def select(): pass\n")
    output = project.without_server().flow()
    assert lines(output, "ran") == ["code"]
    assert "[1/15] code: ran (tasks changed)" in output
    assert "nothing to do: all 15 stages are up to date" in output
    assert project.status() == {}


@pytest.mark.slow
def test_edit_and_new_version_run_their_stages(project: Project) -> None:
    """Stages after one whose outputs are the same as before do not run."""
    project.edit("params.yaml", r"^  uri: null.*\n", "")  # leaves an empty section
    project.edit(CLIP, r"\Z", "MORE = 1\n")
    project.dvc("repro", "--single-item", "code")
    assert sorted(project.status()) == TRAINING
    metadata = project.root / "torch-2.99.0+cpu.dist-info" / "METADATA"  # it precedes the real one
    metadata.parent.mkdir()
    metadata.write_text("Metadata-Version: 2.1\nName: torch\nVersion: 2.99.0+cpu\n")
    output = project.flow("grpo", "--force", "ingest")
    version = "torch 2.13.0 -> 2.99.0"
    assert f"code: ran ({version})" in output
    assert f"profile: starts ({version})" in output
    assert f"train@grpo-0: starts (code {CLIP} changed; {version})" in output
    assert "ingest: starts (requested by --force)" in output
    stages = ["ingest", "profile", "train@grpo-0", "evaluate@grpo-0"]
    assert lines(output, "starts") == stages
    assert lines(output, "ran") == ["code", *stages]
    assert lines(output, "up to date") == ["policy", "allocate@grpo-0"]
    (reason,) = [t["state"]["message"] for t in task_runs(project, 7) if t["name"] == "profile"]
    assert reason == f"{version}; 40 rollouts reused, 8 sampled: 1 prompt new to the store"
