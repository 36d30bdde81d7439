"""A stage run as its command runs, in this process: without the seconds that a new Python takes to
import torch.
"""

import io
import logging
import runpy
import signal
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

SIGNALS = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True)
class Result:
    """The exit status, and everything that the stage logged or printed."""

    returncode: int
    output: str


def run_stage(stage: str, params: Path, data: Path, *options: str) -> Result:
    """`python -m tasks.<stage> --params ... --data ... options`, in this process.

    For tests of what a stage computes and says. What is about processes (signals, kills, several
    ranks, what a stage imports) needs the command itself.
    """
    output = io.StringIO()
    handler = logging.StreamHandler(output)
    handler.setFormatter(logging.Formatter(f"%(asctime)s {stage}: %(message)s"))
    root, arguments = logging.getLogger(), sys.argv
    level, handlers = root.level, {number: signal.getsignal(number) for number in SIGNALS}
    sys.argv = [f"tasks.{stage}", "--params", str(params), "--data", str(data), *options]
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    status = 0
    try:
        with redirect_stdout(output), redirect_stderr(output):
            runpy.run_module(f"tasks.{stage}", run_name="__main__", alter_sys=True)
    except SystemExit as end:
        status = int(end.code or 0)
    finally:
        sys.argv = arguments
        root.removeHandler(handler)
        root.setLevel(level)
        for number, before in handlers.items():
            signal.signal(number, before)
    return Result(status, output.getvalue())
