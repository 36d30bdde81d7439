"""Waiting for events, with a timeout."""

import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")
PATIENCE = 600.0  # seconds: a busy machine is slow, and only a process that hangs takes so long


def wait_for(look: Callable[[], T], process: "subprocess.Popen[str] | None" = None) -> T:
    """Return the first true value of `look`. A `process` that ends first fails the test."""
    deadline = time.monotonic() + PATIENCE
    while not (found := look()):
        if process is not None and process.poll() is not None:
            output = process.stdout and process.communicate()[0]
            raise AssertionError(f"ended with {process.returncode}:\n{output}")
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.02)
    return found


def is_running(pid: int) -> bool:
    """Return whether a process is alive. A zombie is not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
