"""The recipe and the seed of a stage, from the command line or from its name in DVC. And its status
after Ctrl-C during its imports."""

import argparse
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tasks.common.stage import set_cell
from tests.test_imports import ROOT

Cell = tuple[str | None, int | None]


def cell(given: Cell, alone: str | None) -> Cell:
    """Return the recipe and the seed of a command with these options."""
    arguments = argparse.Namespace(recipe=given[0], seed=given[1])
    set_cell(argparse.ArgumentParser(), arguments, alone)
    return arguments.recipe, arguments.seed


@pytest.mark.parametrize(
    ("stage", "given", "found"),
    [
        ("train@sgpo-0", (None, None), ("sgpo", 0)),
        ("other/dvc.yaml:train@b-c-12", (None, None), ("b-c", 12)),
        ("train@sgpo-0", ("grpo", 3), ("grpo", 3)),
        ("", ("grpo", 3), ("grpo", 3)),
        ("baseline", (None, None), (None, None)),
        ("other/dvc.yaml:baseline", (None, None), (None, None)),
        ("", (None, None), (None, None)),
    ],
)
def test_missing_cell_is_read_from_the_name_in_dvc(
    monkeypatch: pytest.MonkeyPatch, stage: str, given: Cell, found: Cell
) -> None:
    monkeypatch.setenv("DVC_STAGE", stage)
    assert cell(given, "baseline") == found


@pytest.mark.parametrize(
    ("stage", "given", "alone"),
    [
        ("", (None, None), None),
        ("", ("grpo", None), "baseline"),
        ("train@sgpo-0", (None, 1), None),
        ("train@sgpo-$(touch x)", (None, None), None),
        ("evaluate@sgpo-0.5", (None, None), "baseline"),
        ("evaluate", (None, None), "baseline"),
    ],
)
def test_incomplete_cell_is_refused(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    stage: str,
    given: Cell,
    alone: str | None,
) -> None:
    monkeypatch.setenv("DVC_STAGE", stage)
    with pytest.raises(SystemExit):
        cell(given, alone)
    output = capsys.readouterr().err
    assert "set both --recipe and --seed" in output
    assert repr(stage) in output


@pytest.mark.parametrize("library", ["yaml", "torch"])
def test_interrupt_during_an_import_leaves_no_traceback(library: str, tmp_path: Path) -> None:
    """Every stage imports yaml before it handles interrupts. This one imports torch afterwards."""
    slow = "import time; print('importing', flush=True); time.sleep(600)"
    (tmp_path / f"{library}.py").write_text(slow)
    line = [sys.executable, "-m", "tasks.profile", "--data", str(tmp_path)]
    stage = subprocess.Popen(
        line,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
    )
    assert stage.stdout is not None
    assert stage.stdout.readline() == "importing\n"
    stage.send_signal(signal.SIGINT)
    _, output = stage.communicate()
    assert stage.returncode == 130
    assert "Traceback" not in output
