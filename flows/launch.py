"""A Python module as a child that ends with its parent; for dvc, one that says whether it started a
stage's command.

    python -m flows.launch PARENT_PID PIPE_FD dvc repro --single-item train@sgpo-0

dvc writes straight to the terminal, progress bars included, so nothing can be read from what it
prints. What it *does* can be seen: every command of a stage is started with DVC_STAGE in its
environment. The first one puts a byte into the pipe; a pipe that stays empty means that dvc found
the outputs in its run cache, or found nothing to do."""

import logging
import os
import runpy
import signal
import sys
from typing import Any

from tasks.common.process import INTERRUPTED, die_with_parent


def announce(pipe: int, stage: str) -> None:
    """Write to `pipe` when this process starts the command of `stage`."""
    os.set_inheritable(pipe, False)

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "subprocess.Popen" and (arguments[3] or {}).get("DVC_STAGE") == stage:
            os.write(pipe, b"1")

    sys.addaudithook(hook)


def main() -> None:
    parent, pipe, module, arguments = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4:]
    die_with_parent()
    if os.getppid() != parent:
        sys.exit(INTERRUPTED)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if pipe >= 0:
        announce(pipe, arguments[-1])
        logging.getLogger("dvc.repo.scm_context").addFilter(
            lambda record: record.levelno > logging.INFO
        )
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
