"""Child processes that die with their parent: a Python module, a dvc that runs many commands, or
the process from which stages are forked.

    python -m flows.pipeline.launch PARENT_PID uvicorn ...
    python -m flows.pipeline.launch PARENT_PID forks ADDRESS
    python -m flows.pipeline.launch PARENT_PID dvc REQUESTS_FD ANSWERS_FD

dvc takes a second to start but milliseconds per query, so one process answers many commands.
A request is a line of JSON, and so is its answer:

    {"arguments": ["status", "--json"], "stage": null, "environment": {...}}
    {"code": 0, "output": "...", "started": false}

A request includes its environment, because the flow's environment changes while dvc runs.

With a `stage`, dvc writes to its own standard streams, for progress bars, and `output` is empty.
`started` states whether the stage's command was started; if not, dvc failed, or had the outputs in
its run cache, or had nothing to do. An audit hook detects the start by the variable DVC_STAGE,
which dvc sets in the environment of the command."""

import importlib
import json
import logging
import os
import runpy
import signal
import sys
import tempfile
from typing import Any

from tasks.common.processes import forks
from tasks.common.processes.ending import INTERRUPTED, PARENT, die_with_parent

STDOUT = 1


class StartedStages:
    """Records, by an audit hook, the names of the stages whose commands this process starts."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        sys.addaudithook(self.hook)

    def hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "subprocess.Popen" and (arguments[3] or {}).get("DVC_STAGE"):
            self.names.add(arguments[3]["DVC_STAGE"])

    def take(self) -> set[str]:
        names, self.names = self.names, set()
        return names


def serve_dvc(requests_fd: int, answers_fd: int) -> None:
    """Run the requested dvc commands until the parent closes the pipe. Only a command can be
    interrupted: between commands and at the exit an interrupt would print a traceback."""
    for descriptor in (requests_fd, answers_fd):
        os.set_inheritable(descriptor, False)
    hide_advice()
    started = StartedStages()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with os.fdopen(requests_fd) as requests, os.fdopen(answers_fd, "w") as answers:
        for line in requests:
            request = json.loads(line)
            os.environ.clear()
            os.environ.update(request["environment"])
            os.environ[PARENT] = str(os.getpid())  # parent of the stages, which must not outlive it
            signal.signal(signal.SIGINT, signal.default_int_handler)
            code, output = run_dvc(request["arguments"], quiet=request["stage"] is None)
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            answer = {"code": code, "output": output, "started": request["stage"] in started.take()}
            answers.write(json.dumps(answer) + "\n")
            answers.flush()


def hide_advice() -> None:
    """Suppress dvc's advice about `git add` and `dvc push`, which would follow every stage, and its
    errors about interrupts."""
    logging.getLogger("dvc.cli").addFilter(lambda record: not is_interrupt(record))
    logging.getLogger("dvc.repo.scm_context").addFilter(
        lambda record: record.levelno > logging.INFO
    )
    ui = importlib.import_module("dvc.ui").ui
    write = ui.write

    def write_most(*objects: Any, **options: Any) -> None:
        if not any(str(one).startswith("Use `dvc push`") for one in objects):
            write(*objects, **options)

    ui.write = write_most


def is_interrupt(record: logging.LogRecord) -> bool:
    """Return whether a record of dvc is about an interrupt of its stage."""
    cause = record.exc_info and record.exc_info[1] and record.exc_info[1].__cause__
    return str(cause).endswith(f"exited with {INTERRUPTED}")


def run_dvc(arguments: list[str], quiet: bool) -> tuple[int, str]:
    """Run one dvc command. Return its exit status, and what the command and its children wrote to
    standard output if `quiet`, else an empty string.

    The descriptor is redirected, not `sys.stdout`, because dvc keeps the first stream it finds."""
    if not quiet:
        return run_module("dvc", arguments), ""
    with tempfile.TemporaryFile() as printed:
        sys.stdout.flush()
        terminal = os.dup(STDOUT)
        os.dup2(printed.fileno(), STDOUT)
        try:
            code = run_module("dvc", arguments)
        finally:
            sys.stdout.flush()
            os.dup2(terminal, STDOUT)
            os.close(terminal)
        printed.seek(0)
        return code, printed.read().decode()


def run_module(module: str, arguments: list[str]) -> int:
    """Run `python -m MODULE ARGUMENTS` in this process and return its exit status."""
    sys.argv = [module, *arguments]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


def main() -> None:
    parent, module, arguments = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
    die_with_parent()
    if os.getppid() != parent:
        sys.exit(INTERRUPTED)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # blocked by the parent
        if module == "dvc":
            serve_dvc(int(arguments[0]), int(arguments[1]))
        elif module == "forks":
            forks.serve_stages(arguments[0])
        else:
            sys.exit(run_module(module, arguments))
    except KeyboardInterrupt:  # nothing is running
        sys.exit(INTERRUPTED)


if __name__ == "__main__":
    main()
