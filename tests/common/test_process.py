"""Messages about locks, and the exit status after an interrupt."""

import errno
import logging
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tasks.common.files import WriteError
from tasks.common.processes.locks import exclusive
from tests.full import largest_file
from tests.patience import PATIENCE


def test_second_process_waits_and_logs_the_holder(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lock, held = tmp_path / "lock", []
    code = (
        "import sys; from pathlib import Path; from tasks.common.processes.locks import exclusive\n"
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
        holder.stdin.close()  # the process continues, and ends
        second.result()
    assert len(held) == 1
    assert f"waiting for the checkpoints of sgpo/0: process {holder.pid} holds it" in caplog.text
    holder.wait()


def test_lock_on_a_full_or_read_only_file_system_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(path: Path, *more: Any) -> int:
        raise OSError(errno.EROFS, "Read-only file system", str(path))

    path = tmp_path / "locks" / "pipeline"
    with largest_file(0), pytest.raises(WriteError, match=f"{path}: the file would be larger"):
        exclusive(path, "the pipeline").__enter__()
    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(WriteError, match=f"{path}: the file system is read-only"):
        exclusive(path, "the pipeline").__enter__()


INTERRUPTED = """
import sys
from tasks.common.processes import ending

try:
    exec("raise KeyboardInterrupt")  # as in the making of a dataclass
except KeyboardInterrupt:
    status = ending.interrupted(*map(int, sys.argv[1:]))
sys.exit(status)
"""


@pytest.mark.parametrize(("given", "status"), [((), 130), (("0",), 0)])
def test_caught_interrupt_does_not_change_the_status(
    given: tuple[str, ...], status: int, tmp_path: Path
) -> None:
    (tmp_path / "interrupted.py").write_text(INTERRUPTED)
    command = [sys.executable, "-m", "interrupted", *given]
    paths = os.pathsep.join([str(tmp_path), os.getcwd()])
    ended = subprocess.run(command, env={**os.environ, "PYTHONPATH": paths}, timeout=PATIENCE)
    assert ended.returncode == status
