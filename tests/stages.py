"""Fast starts of stages, without the imports of torch and MLflow: in this process, or forked from a
process that has imported them. And functions run side by side, and fast copies of an empty MLflow
database.
"""

import faulthandler
import io
import logging
import multiprocessing
import os
import runpy
import shutil
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.common.artifacts import Layout
from tasks.common.processes import forks
from tests.once import once

SIGNALS = (signal.SIGINT, signal.SIGTERM)
FORKS = multiprocessing.get_context("forkserver")
# Not polars, nor mlflow which imports it: it starts threads, and they do not survive a fork.
FORKS.set_forkserver_preload(
    [
        "transformers.models.qwen3.modeling_qwen3",
        "sqlalchemy.orm",
        "alembic.command",
        "fastapi",
        "s3fs",
    ]
)


@dataclass(frozen=True)
class Result:
    """The exit status and the output of a stage, with its log."""

    returncode: int
    output: str


def run_stage(
    stage: str, params: Path, data: Path, *options: str, level: int = logging.INFO
) -> Result:
    """Run `python -m tasks.<stage> --params ... --data ... options` in this process.

    This is for tests of outputs and messages. Tests of processes (signals, kills, several ranks,
    imports) need the command itself.
    """
    if "--dry-run" not in options:
        give_record(data)
    output = io.StringIO()
    handler = logging.StreamHandler(output)
    handler.setFormatter(logging.Formatter(f"%(asctime)s {stage}: %(message)s"))
    root, arguments, address = logging.getLogger(), sys.argv, os.environ.pop(forks.ADDRESS, None)
    before, handlers = root.level, {number: signal.getsignal(number) for number in SIGNALS}
    sys.argv = [f"tasks.{stage}", "--params", str(params), "--data", str(data), *options]
    root.addHandler(handler)
    root.setLevel(level)
    status = 0
    try:
        with redirect_stdout(output), redirect_stderr(output):
            runpy.run_module(f"tasks.{stage}", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        status = int(end.code or 0)
    finally:
        sys.argv = arguments
        os.environ.update({} if address is None else {forks.ADDRESS: address})
        root.removeHandler(handler)
        root.setLevel(before)
        for number, previous in handlers.items():
            signal.signal(number, previous)
    return Result(status, output.getvalue())


class Started:
    """A stage in its own Python, as a user starts it."""

    def __init__(self, stage: str, params: Path, data: Path, *options: str) -> None:
        give_record(data)
        paths = ["--params", str(params), "--data", str(data)]
        line = [sys.executable, "-m", f"tasks.{stage}", *paths, *options]
        self.process = subprocess.Popen(line, stderr=subprocess.PIPE, text=True)
        self.poll, self.kill = self.process.poll, self.process.kill
        self.send_signal = self.process.send_signal

    @property
    def returncode(self) -> int | None:
        return self.process.returncode

    def finish(self) -> str:
        """Wait for the end of the stage, and return its log."""
        return self.process.communicate()[1]


class Forked:
    """A stage forked from a process that has imported its libraries, with the environment of that
    process and these variables."""

    def __init__(
        self, stage: str, params: Path, data: Path, *options: str, variables: Mapping[str, str] = {}
    ) -> None:
        give_record(data)
        self.log = data / f"{stage}-{os.urandom(4).hex()}.log"
        arguments = ["--params", str(params), "--data", str(data), *options]
        each = (f"tasks.{stage}", arguments, self.log, dict(variables))
        self.process = FORKS.Process(target=as_main, args=each)
        self.process.start()
        self.kill = self.process.kill

    @property
    def returncode(self) -> int | None:
        return self.process.exitcode

    def poll(self) -> int | None:
        return self.process.exitcode

    def send_signal(self, number: int) -> None:
        assert self.process.pid is not None
        os.kill(self.process.pid, number)

    def finish(self) -> str:
        """Wait for the end of the stage, and return its log and output."""
        self.process.join()
        return self.log.read_text()


def as_main(module: str, arguments: list[str], log: Path, variables: dict[str, str]) -> None:
    """Run `python -m module arguments` in this process, with the output in the file `log`."""
    os.environ.update(variables)
    with log.open("wb") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def give_record(data: Path) -> None:
    """Copy an empty MLflow database to a data root, as the first stage would make it."""
    tracking = Layout(data).tracking
    if not tracking.exists():
        shutil.copytree(once("record", make_record), tracking)


def make_record(folder: Path) -> None:
    from tasks.common.tracking.runs import connect

    connect(f"sqlite:///{folder}/mlflow.db")


def run_together(work: Callable[..., None], arguments: Sequence[tuple[Any, ...]]) -> None:
    """Run `work` in a process for each tuple of arguments, side by side. All must succeed."""
    processes = [FORKS.Process(target=work, args=each) for each in arguments]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert [process.exitcode for process in processes] == [0] * len(processes)


TEAMS: dict[int, list[ProcessPoolExecutor]] = {}


def run_in_workers(work: Callable[..., None], arguments: Sequence[tuple[Any, ...]]) -> None:
    """Do the same as `run_together` in processes that have run other work, since imports take
    longer than most work. A team of as many processes always works together: torch numbers the
    process groups of a process."""
    team = TEAMS.pop(len(arguments), None) or [ProcessPoolExecutor(1, FORKS) for _ in arguments]
    pairs = zip(team, arguments, strict=True)
    for future in [worker.submit(run_or_exit, work, each) for worker, each in pairs]:
        future.result()
    TEAMS[len(team)] = team


def run_or_exit(work: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    """Run `work`. An exception ends the process, so that no other one waits for it. The stacks of
    a crash in native code are printed."""
    faulthandler.enable()
    try:
        work(*arguments)
    except BaseException:
        traceback.print_exc()
        os._exit(1)
