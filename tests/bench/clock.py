"""Time and memory of one training process, measured in the same way on both sides of a comparison.
The module imports nothing heavy."""

import dataclasses
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil


@dataclasses.dataclass(frozen=True)
class Job:
    """The run of one side: `steps` steps in the world under `root`, with the policy saved after the
    steps in `points`. Without a learning rate, the world's own applies. `is_mixed`: TRL computes in
    bfloat16 with float32 weights; Winnow's dtypes are the world's."""

    side: str
    root: Path
    out: Path
    steps: int
    seed: int
    points: list[int]
    learning_rate: float | None
    is_mixed: bool = False


class Clock:
    """End times of the steps, in wall and CPU seconds of training, and wall seconds of generation
    up to them. Time under `paused` is not counted.

    CPU seconds are included because the cores may be shared: they do not grow while another job has
    the core."""

    def __init__(self) -> None:
        self.wall: list[float] = [0.0]
        self.cpu: list[float] = [0.0]
        self.generation: list[float] = [0.0]
        self.start = (time.perf_counter(), time.process_time())

    def tick(self, generation: float) -> None:
        """Record the end of a step, and the seconds of generation so far."""
        self.generation.append(generation)
        self.wall.append(time.perf_counter() - self.start[0])
        self.cpu.append(time.process_time() - self.start[1])

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Exclude work that is not part of training, such as saving a policy for later
        evaluation."""
        before = (time.perf_counter(), time.process_time())
        yield
        self.start = (
            self.start[0] + time.perf_counter() - before[0],
            self.start[1] + time.process_time() - before[1],
        )


def peak_megabytes() -> float:
    """Return the peak resident memory of this process alone. `ru_maxrss` is not used: on Linux it
    starts at the parent's value before exec."""
    line = next(
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("VmHWM")
    )
    return int(line.split()[1]) / 1024


def children_megabytes() -> float:
    """Return the resident memory of this process's children (a verifier) now."""
    return (
        sum(child.memory_info().rss for child in psutil.Process().children(recursive=True)) / 2**20
    )
