"""The timeout of tests that wait for an event."""

import subprocess
import time
from collections.abc import Callable
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
