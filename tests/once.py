"""Folders that are made once for all workers of a run of the tests, and then only read."""

import shutil
from collections.abc import Callable
from pathlib import Path

from tasks.common.processes.locks import exclusive

folder = Path()  # where they stand: one for all workers, set when a worker begins


def once(name: str, make: Callable[[Path], object]) -> Path:
    """The folder `name` that `make` filled, in whichever worker asked for it first."""
    made, done = folder / name, folder / f"{name}.done"
    with exclusive(folder / f"{name}.lock", f"the making of {name}"):
        if not done.exists():
            shutil.rmtree(made, ignore_errors=True)  # of a worker that failed half-way
            made.mkdir()
            make(made)
            done.touch()
    return made
