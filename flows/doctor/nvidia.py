"""The GPUs of this machine, according to nvidia-smi."""

import subprocess
from dataclasses import dataclass

MIB = 2**20
QUERY = ("nvidia-smi", "--query-gpu=name,memory.free,memory.total", "--format=csv,noheader,nounits")


@dataclass(frozen=True)
class Gpu:
    """One GPU, with its memory in bytes."""

    name: str
    free: float
    total: float


def gpus() -> list[Gpu]:
    """Return the GPUs of this machine; empty if nvidia-smi is missing or its output is unusable."""
    try:
        done = subprocess.run(QUERY, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return parsed(done.stdout)


def parsed(text: str) -> list[Gpu]:
    """Return the GPUs in the output of nvidia-smi, except GPUs with unknown memory."""
    found = []
    for line in text.splitlines():
        name, *numbers = [part.strip() for part in line.split(",")]
        if len(numbers) == 2 and all(number.isdecimal() for number in numbers):
            free, total = (int(number) * MIB for number in numbers)
            found.append(Gpu(name, free, total))
    return found
