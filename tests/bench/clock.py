"""Time and memory of one training process, measured alike on both sides of a comparison; imports
nothing heavy."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil


class Clock:
    """When each step ended, in wall and in CPU seconds of training: what happens under `paused` is
    not counted.

    CPU seconds are there because the cores may be shared: they do not grow while another job has
    the core."""

    def __init__(self) -> None:
        self.wall: list[float] = [0.0]
        self.cpu: list[float] = [0.0]
        self.start = (time.perf_counter(), time.process_time())

    def tick(self) -> None:
        """A step has ended."""
        self.wall.append(time.perf_counter() - self.start[0])
        self.cpu.append(time.process_time() - self.start[1])

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Do something that is no part of training, such as saving a policy to be evaluated
        later."""
        before = (time.perf_counter(), time.process_time())
        yield
        self.start = (
            self.start[0] + time.perf_counter() - before[0],
            self.start[1] + time.process_time() - before[1],
        )


def peak_megabytes() -> float:
    """The largest resident memory this process has had. Of its own memory only: `ru_maxrss` starts,
    on Linux, at what the parent had before exec."""
    line = next(
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("VmHWM")
    )
    return int(line.split()[1]) / 1024


def children_megabytes() -> float:
    """What the processes this one has started (a verifier) hold now."""
    return (
        sum(child.memory_info().rss for child in psutil.Process().children(recursive=True)) / 2**20
    )


def seconds_since_start() -> float:
    """Since this process was started: what importing and building have taken."""
    return time.time() - psutil.Process().create_time()
