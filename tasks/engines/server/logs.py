"""The logs of servers, kept under the data root after the servers have exited. Each start of an
engine gets a numbered folder, which contains one log per server."""

import os
import shutil
from contextlib import suppress
from pathlib import Path

from tasks.common.files import make_private_folder

MAX_STARTS = 8  # number of starts whose logs are kept
TAIL = 2000  # characters of a log in an error
MAX_BYTES = 8 * 2**20  # maximum size of a log; above it, the last MAX_BYTES / 2 are kept


def new_folder(logs: Path) -> Path:
    """Create and return the folder for a new start's logs, after removing the oldest folders."""
    make_private_folder(logs)
    numbers = sorted(int(path.name) for path in logs.iterdir() if path.name.isdecimal())
    for number in numbers[: 1 - MAX_STARTS]:
        shutil.rmtree(logs / str(number), ignore_errors=True)
    folder = logs / str(max(numbers, default=0) + 1)
    folder.mkdir()
    return folder


def tail(log: Path) -> str:
    """Return the last TAIL characters of a log; an empty text if there is no log."""
    return log.read_text(errors="replace")[-TAIL:] if log.exists() else ""


def shorten(log: Path) -> None:
    """Drop all but the last MAX_BYTES / 2 of a log above MAX_BYTES. A server that has the log open
    appends at the new end."""
    with suppress(FileNotFoundError):
        if log.stat().st_size > MAX_BYTES:
            with log.open("r+b") as file:
                file.seek(-MAX_BYTES // 2, os.SEEK_END)
                newer = file.read()
                file.seek(0)
                file.write(newer)
                file.truncate()
