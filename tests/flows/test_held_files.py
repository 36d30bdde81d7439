"""A flow that DVC refuses, because of its notes of who reads and writes which file, says what to
do."""

import json
import os
from typing import Any

import pytest

from tests.flows.project import Project

NOTES = (
    ("", ""),  # a dvc was killed while it wrote its notes
    ("data/runs/grpo/0/plan/plan.parquet", "read"),  # what a stage that runs would write
)


@pytest.mark.slow
def test_message_names_the_file_to_remove(project: Project) -> None:
    """The process of a note may be alive, and no dvc: pids are used again."""
    notes = project.root / ".dvc" / "tmp" / "rwlock"
    holder: Any = {"pid": os.getpid(), "cmd": "/bin/dvc repro profile"}
    project.edit("params.yaml", r"^  passes: 4", "  passes: 5")
    for place, how in NOTES:
        held = {str(project.root / place): [holder] if how == "read" else holder}
        notes.write_text(json.dumps({how: held}) if place else '{"write": {"/data/ru')
        output = project.flow("grpo", expect=1)
        assert f"if no dvc runs here, remove '{notes}'" in output, place
        assert "Traceback" not in output
