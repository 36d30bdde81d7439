"""Inputs that change while a stage runs, and settings whose names DVC's run cache ignores."""

import subprocess
import sys
from collections.abc import Callable

import pytest

from tests.flows.project import Project

GRPO = "tasks/train/methods/advantage/grpo.py"
TABLE = "data/prompts/train.parquet"
FLIP = f"sh: sed -i 's/^def advantage/FLIPPED = 1\\n\\ndef advantage/' {GRPO}"
Run = Callable[[Project, int], str]


def by_winnow(project: Project, expect: int = 0) -> str:
    return project.flow("grpo", expect=expect)


def by_dvc(project: Project, expect: int = 0) -> str:
    command = [sys.executable, "-m", "dvc", "repro", "evaluate@grpo-0"]
    done = subprocess.run(command, **project.options())
    assert bool(done.returncode) == bool(expect), done.stdout
    return str(done.stdout)


@pytest.fixture(params=[by_winnow, by_dvc])
def run(request: pytest.FixtureRequest) -> Run:
    return request.param  # type: ignore[no-any-return]


def profile(project: Project) -> str:
    return (project.root / "data/profile/profile.parquet").read_text()


@pytest.mark.slow
def test_an_input_replaced_while_a_stage_runs_voids_the_stage(project: Project, run: Run) -> None:
    project.edit("params.yaml", "num_samples: 8 ", "num_samples: 9 ")
    project.behave(profile=f"sh: echo other > new && mv new {TABLE}")
    output = run(project, 1)
    assert f"{TABLE} changed while the stage ran: its outputs are void" in output
    assert {"ingest", "profile"} <= project.status().keys()
    project.behave()
    run(project, 0)
    assert "other" not in (project.root / TABLE).read_text()
    assert not {"ingest", "profile", "train@grpo-0"} & project.status().keys()


@pytest.mark.slow
def test_parameters_changed_during_a_run_reach_no_stage_of_it(project: Project, run: Run) -> None:
    project.edit("params.yaml", "num_samples: 8 ", "num_samples: 9 ")
    project.edit("params.yaml", "^ingest:", "ingest:\n  seed: 5")
    project.behave(ingest="sh: sed -i 's/num_samples: 9 /num_samples: 16 /' params.yaml")
    run(project, 0)
    project.edit("params.yaml", "num_samples: 16 ", "num_samples: 9 ")
    project.behave()
    of_nine = profile(project)
    project.dvc("repro", "--force", "--single-item", "profile")
    assert profile(project) == of_nine
    project.edit("params.yaml", "num_samples: 9 ", "num_samples: 16 ")
    project.dvc("repro", "profile")
    assert profile(project) != of_nine


@pytest.mark.slow
def test_code_changed_during_a_run_is_never_recorded(project: Project, run: Run) -> None:
    project.edit("params.yaml", "learning_rate: 3.0e-4", "learning_rate: 2.0e-4")
    clean = (project.root / GRPO).read_text()
    project.behave(train__grpo_0=FLIP)
    assert f"{GRPO} changed while the stage ran: its outputs are void" in run(project, 1)
    project.dvc("repro", "--single-item", "code")
    (project.root / GRPO).write_text(clean)  # after the stage `code`
    command = [sys.executable, "-m", "dvc", "repro", "--single-item", "train@grpo-0"]
    done = subprocess.run(command, **project.options())
    assert f"{GRPO} changed after the stage code had recorded it: run again" in done.stdout
    assert "train@grpo-0" in project.status()
    project.behave()
    run(project, 0)
    assert "train@grpo-0" not in project.status()


@pytest.mark.slow
def test_a_setting_named_size_repeats_its_cells(project: Project, run: Run) -> None:
    """With no entry in the run cache, with one of another value, and with its own."""
    ran = "this is train@grpo-0, live"
    for size, is_new in ((16, True), (48, True), (16, False)):
        project.edit("params.yaml", r"unit: rollouts, size: \d+", f"unit: rollouts, size: {size}")
        assert (ran in run(project, 0)) is is_new
        settings = (project.root / "data/code/grpo/train.params.yaml").read_text()
        assert f"size: {size}" in settings
        assert "train@grpo-0" not in project.status()
