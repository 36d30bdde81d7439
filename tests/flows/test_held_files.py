"""The message of a flow that DVC refuses because of its locks on the files of other stages."""

import json
import os
from typing import Any

import pytest

from tests.flows.project import Project

NOTES = (
    ("", ""),  # dvc was killed while it wrote its locks
    ("data/runs/grpo/0/plan/plan.parquet", "read"),  # an output of a running stage
)


@pytest.mark.slow
def test_message_names_the_file_to_remove(project: Project) -> None:
    """The process of a lock may be alive, but not a dvc: pids are reused."""
    notes = project.root / ".dvc" / "tmp" / "rwlock"
    holder: Any = {"pid": os.getpid(), "cmd": "/bin/dvc repro profile"}
    project.edit("params.yaml", r"^  passes: 4", "  passes: 5")
    for place, access in NOTES:
        held = {str(project.root / place): [holder] if access == "read" else holder}
        notes.write_text(json.dumps({access: held}) if place else '{"write": {"/data/ru')
        output = project.flow("grpo", expect=1)
        assert f"if no dvc runs here, remove '{notes}'" in output, place
        assert "Traceback" not in output
