"""Substitutes for full and read-only disks.

A limit on the size of files needs no rights: a write beyond it fails in the middle of a file, as on
a full disk. A real full or read-only disk is a small file system in memory, which only root may
mount."""

import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    """Limit the size of files in this process and its children during the block."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@contextmanager
def small_disk(folder: Path, num_bytes: int) -> Iterator[Path]:
    """Mount a small disk at `folder`. Skip the test if that is not permitted."""
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
    """Remount a small disk with `options`: `ro`, or `size=...`."""
    subprocess.run(["mount", "-o", f"remount,{options}", str(folder)], check=True)
