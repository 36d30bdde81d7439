"""Processes end with their parents, whenever those end; locks name their holder."""

import logging
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tasks.common.process import exclusive

CHILD = """
import sys, time
print("started", flush=True)
time.sleep(float(sys.argv[2]))  # imports
from tasks.common.process import die_with_parent
die_with_parent()
open(sys.argv[1], "a").write("alive ")
time.sleep(1.5)
open(sys.argv[1], "a").write("still alive")
"""
PARENT = "import subprocess, sys; subprocess.run([sys.executable, '-c', *sys.argv[1:]])"


@pytest.mark.parametrize(("imports", "expected"), [(0.0, "alive "), (1.0, "")])
def test_a_stage_ends_with_dvc_also_when_dvc_ends_first(
    imports: float, expected: str, tmp_path: Path
) -> None:
    marker = tmp_path / "marker"
    marker.touch()
    environment = {**os.environ, "DVC_STAGE": "train"}
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, CHILD, str(marker), str(imports)],
        stdout=subprocess.PIPE,
        env=environment,
        start_new_session=True,
    )
    assert parent.stdout is not None
    assert parent.stdout.readline() == b"started\n"
    if not imports:
        while not marker.read_text():
            time.sleep(0.02)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    time.sleep(2.0)
    assert marker.read_text() == expected


def test_a_stage_whose_parent_lives_is_left_alone(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    environment = {**os.environ, "DVC_STAGE": "train"}
    command = [sys.executable, "-c", PARENT, CHILD, str(marker), "0"]
    subprocess.run(
        command, check=True, env=environment, start_new_session=True, capture_output=True
    )
    assert marker.read_text() == "alive still alive"


def test_a_second_holder_waits_and_is_told_for_whom(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lock = tmp_path / "lock"
    code = (
        "import sys, time; from pathlib import Path; from tasks.common.process import exclusive\n"
        "with exclusive(Path(sys.argv[1]), 'it'): print('held', flush=True); time.sleep(1)"
    )
    holder = subprocess.Popen([sys.executable, "-c", code, str(lock)], stdout=subprocess.PIPE)
    assert holder.stdout is not None
    holder.stdout.readline()
    started = time.monotonic()
    with caplog.at_level(logging.WARNING), exclusive(lock, "the checkpoints of sgpo/0"):
        assert time.monotonic() - started > 0.5
    assert f"waiting for the checkpoints of sgpo/0: process {holder.pid} holds it" in caplog.text
    holder.wait()
