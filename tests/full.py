"""Places that take no more writes, as far as a test may make them.

A limit on the size of files needs no rights: a write beyond it fails in the middle of a file, as on
a full disk. A real full disk and a read-only one are small file systems in memory, which only root
may mount."""

import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    """No file grows beyond `num_bytes` while the block lasts, in this process or those that it
    starts."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextmanager
def small_disk(folder: Path, num_bytes: int) -> Iterator[Path]:
    """A disk of its own at `folder`; the test is skipped where none may be mounted."""
    folder.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", str(folder)]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no file system may be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def remount(folder: Path, options: str) -> None:
    """Change a small disk: `ro`, or `size=...`."""
    subprocess.run(["mount", "-o", f"remount,{options}", str(folder)], check=True)
