"""Processes end with their parents, whenever those end; locks name their holder."""

import logging
import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tasks.common.process import exclusive

CHILD = """
import os, sys, time
parent = os.getppid()
print(os.getpid(), flush=True)
while sys.argv[2] == "imports" and os.getppid() == parent:  # until the parent is gone
    time.sleep(0.01)
from tasks.common.process import die_with_parent
die_with_parent()
open(sys.argv[1], "a").write("alive ")
time.sleep(float(sys.argv[3]))
open(sys.argv[1], "a").write("still alive")
"""
PARENT = "import subprocess, sys; subprocess.run([sys.executable, '-c', *sys.argv[1:]])"


def is_running(pid: int) -> bool:
    """Whether a process lives; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


@pytest.mark.parametrize(("when", "expected"), [("running", "alive "), ("imports", "")])
def test_a_stage_ends_with_dvc_also_when_dvc_ends_first(
    when: str, expected: str, tmp_path: Path
) -> None:
    marker = tmp_path / "marker"
    marker.touch()
    environment = {**os.environ, "DVC_STAGE": "train"}
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, CHILD, str(marker), when, "30"],
        stdout=subprocess.PIPE,
        env=environment,
        start_new_session=True,
    )
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    while when == "running" and not marker.read_text():
        time.sleep(0.02)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    while is_running(child):
        time.sleep(0.02)
    assert marker.read_text() == expected


def test_a_stage_whose_parent_lives_is_left_alone(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    environment = {**os.environ, "DVC_STAGE": "train"}
    command = [sys.executable, "-c", PARENT, CHILD, str(marker), "running", "0.5"]
    subprocess.run(
        command, check=True, env=environment, start_new_session=True, capture_output=True
    )
    assert marker.read_text() == "alive still alive"


def test_a_second_holder_waits_and_is_told_for_whom(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lock, held = tmp_path / "lock", []
    code = (
        "import sys; from pathlib import Path; from tasks.common.process import exclusive\n"
        "with exclusive(Path(sys.argv[1]), 'it'): print('held', flush=True); sys.stdin.read()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", code, str(lock)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert holder.stdin is not None
    assert holder.stdout is not None
    holder.stdout.readline()

    def hold() -> None:
        with exclusive(lock, "the checkpoints of sgpo/0"):
            held.append(holder.poll())

    with caplog.at_level(logging.WARNING), ThreadPoolExecutor(1) as pool:
        second = pool.submit(hold)
        while not caplog.records and not second.done():
            time.sleep(0.01)
        assert held == []
        holder.stdin.close()  # it goes on, and ends
        second.result()
    assert len(held) == 1
    assert f"waiting for the checkpoints of sgpo/0: process {holder.pid} holds it" in caplog.text
    holder.wait()
