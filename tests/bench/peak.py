"""Seconds and peak memory of a command.

A new process inherits the memory count of the process from which it was forked. So a small separate
Python starts the command and reports its usage."""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from tests.bench.world import PROJECT

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
