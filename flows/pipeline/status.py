"""Which run is in which stage, since when, and how far.

A flow notes its stages in the lock file of the pipeline. The kernel releases the lock of a killed
process, so its note is not shown. DVC's own note names the processes of a plain `dvc repro`."""

import json
import os
import re
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from flows.pipeline import commands, roots, summary
from tasks.common.processes import locks

RUNNER = "PREFECT__FLOW_RUN_ID"  # set in processes started by a Prefect runner
BAR = re.compile(r"\|[^|]*\|\s*")  # of a progress bar: between percentage and count
ongoing: dict[str, dict[str, Any]] = {}  # stages of this process's flow, by title
one_note = threading.Lock()  # each stage has a thread


def lock_file() -> Path:
    return roots.Root().layout.locks / "pipeline"


def note(title: str = "", progress: str | None = "") -> None:
    """Note that this process's flow is in a stage, and its progress; None: the stage has ended."""
    with one_note, suppress(OSError):
        if progress is None:
            ongoing.pop(title, None)
        elif title:
            ongoing.setdefault(title, {"since": time.time()})["progress"] = BAR.sub(" ", progress)
        command = "winnow serve" if RUNNER in os.environ else summary.same_command()
        locks.note(lock_file(), json.dumps({"command": command, "stages": ongoing}))


def now() -> str:
    """Return what runs, as text: a flow and its stages, or a `dvc repro`; empty if nothing does."""
    try:
        pid, text = locks.held(lock_file())
        noted = json.loads(text)
    except ValueError:  # no flow, or one that has not noted anything yet
        return "\n".join(f"dvc runs a stage (process {pid})" for pid in of_dvc())
    lines = [f"`{noted['command']}` runs (process {pid})"]
    for title, stage in noted["stages"].items():
        since = time.strftime("%H:%M:%S", time.localtime(stage["since"]))
        minutes = (time.time() - stage["since"]) / 60
        lines.append(f"  {title} since {since} ({minutes:.0f} min)  {stage['progress']}".rstrip())
    return "\n".join(lines)


def of_dvc() -> list[str]:
    """Return the live processes that DVC's note of running stages names."""
    notes = commands.ROOT / ".dvc" / "tmp" / "rwlock"
    pids = re.findall(r'"pid": (\d+)', notes.read_text() if notes.exists() else "")
    return [pid for pid in dict.fromkeys(pids) if Path(f"/proc/{pid}").exists()]
