"""Seconds and peak memory of a command, and the result of a function in a process of its own.

A new process inherits the memory count of the process from which it was forked. So a small separate
Python starts the command and reports its usage."""

import json
import multiprocessing
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from typing import Any

from tests.files import PROJECT

LAUNCH = (
    "import json, resource, subprocess, sys, time\n"
    "started = time.perf_counter()\n"
    "done = subprocess.run(sys.argv[1:], stdout=sys.stderr)\n"
    "spent = resource.getrusage(resource.RUSAGE_CHILDREN)\n"
    "print(json.dumps([done.returncode, time.perf_counter() - started, spent.ru_maxrss / 1024]))\n"
)


@dataclass(frozen=True)
class Peak:
    """The usage of a command. The megabytes are of its largest process."""

    seconds: float
    megabytes: float

    def __sub__(self, other: "Peak") -> "Peak":
        return Peak(self.seconds - other.seconds, self.megabytes - other.megabytes)


def peak_of(arguments: Sequence[str]) -> Peak:
    """Run Python with these arguments. Raises RuntimeError with the end of its log if it fails."""
    line = [sys.executable, "-c", LAUNCH, sys.executable, *arguments]
    done = subprocess.run(line, capture_output=True, text=True, cwd=PROJECT)
    status, seconds, megabytes = json.loads(done.stdout)
    if status:
        raise RuntimeError(done.stderr[-3000:])
    return Peak(seconds, megabytes)


def in_new_process(function: Callable[..., Any], *arguments: Any) -> Any:
    """Return the result of a call in a new Python."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()
