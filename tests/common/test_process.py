"""Messages about locks, and the exit status after an interrupt."""

import errno
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tasks.common.files import WriteError
from tasks.common.processes.locks import exclusive
from tests.full import largest_file
from tests.patience import PATIENCE, wait_for


def test_second_holder_waits_and_logs_the_first(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lock, held = tmp_path / "lock", []

    def hold() -> None:
        with exclusive(lock, "the checkpoints of sgpo/0"):
            held.append(True)

    with ThreadPoolExecutor(1) as pool:
        with exclusive(lock, "it"):
            second = pool.submit(hold)
            wait_for(lambda: caplog.records or second.done())
            assert held == []
        second.result()
    assert held == [True]
    assert f"waiting for the checkpoints of sgpo/0: process {os.getpid()} holds it" in caplog.text


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
