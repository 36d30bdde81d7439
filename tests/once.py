"""Folders that all workers of a test run share: one worker makes them, all read them."""

import shutil
from collections.abc import Callable
from pathlib import Path

from tasks.common.processes.locks import exclusive

folder = Path()  # the parent of the folders, the same for all workers; set when a worker begins


def once(name: str, make: Callable[[Path], object]) -> Path:
    """Return the folder `name`. The first worker that calls this fills it by `make`."""
    made, done = folder / name, folder / f"{name}.done"
    with exclusive(folder / f"{name}.lock", f"the making of {name}"):
        if not done.exists():
            shutil.rmtree(made, ignore_errors=True)  # left by a worker that failed
            made.mkdir()
            make(made)
            done.touch()
    return made
