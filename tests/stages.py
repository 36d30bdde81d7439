"""Stages without the seconds that a new Python takes to import torch and MLflow: in this process,
or in one forked from a process that has imported them. And MLflow's database without the seconds
that it takes to make.
"""

import io
import logging
import multiprocessing
import os
import runpy
import shutil
import signal
import subprocess
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

from tasks.common.artifacts import Layout
from tasks.common.processes import forks
from tests.once import once

SIGNALS = (signal.SIGINT, signal.SIGTERM)
FORKS = multiprocessing.get_context("forkserver")
# Not polars, nor mlflow which imports it: it starts threads, and they do not survive a fork.
FORKS.set_forkserver_preload(
    [
        "transformers.models.qwen3.modeling_qwen3",
        "sklearn.linear_model",
        "sqlalchemy.orm",
        "alembic.command",
        "fastapi",
        "s3fs",
    ]
)


@dataclass(frozen=True)
class Result:
    """The exit status, and everything that the stage logged or printed."""

    returncode: int
    output: str


def run_stage(
    stage: str, params: Path, data: Path, *options: str, level: int = logging.INFO
) -> Result:
    """`python -m tasks.<stage> --params ... --data ... options`, in this process.

    For tests of what a stage computes and says. What is about processes (signals, kills, several
    ranks, what a stage imports) needs the command itself.
    """
    if "--dry-run" not in options:
        give_record(data)
    arguments = ["--params", str(params), "--data", str(data), *options]
    return run_command(f"tasks.{stage}", *arguments, level=level)


def run_command(module: str, *options: str, level: int) -> Result:
    """`python -m module options`, in this process, with what is logged from `level` on."""
    output = io.StringIO()
    handler = logging.StreamHandler(output)
    handler.setFormatter(logging.Formatter(f"%(asctime)s {module.split('.', 1)[1]}: %(message)s"))
    root, arguments, address = logging.getLogger(), sys.argv, os.environ.pop(forks.ADDRESS, None)
    before, handlers = root.level, {number: signal.getsignal(number) for number in SIGNALS}
    sys.argv = [module, *options]
    root.addHandler(handler)
    root.setLevel(level)
    status = 0
    try:
        with redirect_stdout(output), redirect_stderr(output):
            runpy.run_module(module, run_name="__main__", alter_sys=True)
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
    """A stage as a user starts it, in a Python of its own."""

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
        """Wait for its end; what it logged."""
        return self.process.communicate()[1]


class Forked:
    """A stage in a process forked from one that has imported its libraries. Its environment is that
    of the first one."""

    def __init__(self, stage: str, params: Path, data: Path, *options: str) -> None:
        give_record(data)
        self.log = data / f"{stage}-{os.urandom(4).hex()}.log"
        arguments = ["--params", str(params), "--data", str(data), *options]
        self.process = FORKS.Process(target=as_main, args=(f"tasks.{stage}", arguments, self.log))
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
        """Wait for its end; what it logged and printed."""
        self.process.join()
        return self.log.read_text()


def as_main(module: str, arguments: list[str], log: Path) -> None:
    """Become `python -m module arguments`, which writes to the file `log`."""
    with log.open("wb") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def give_record(data: Path) -> None:
    """MLflow's database under a data root that has none yet, as the first stage would make it."""
    tracking = Layout(data).tracking
    if not tracking.exists():
        shutil.copytree(once("record", make_record), tracking)


def make_record(folder: Path) -> None:
    from tasks.common.tracking.runs import connect

    connect(f"sqlite:///{folder}/mlflow.db")
