"""Record the files of this project that a process and its children load.

Python imports a module of this name automatically when it starts. Only the stages of `test_loaded`
have it on their path. They are forks of a process that has imported slow libraries, but none of the
project's files (see `tests.stages.FORKS`)."""

import os
import runpy
import sys
from pathlib import Path
from typing import Any


class Recorder:
    """A finder that finds nothing, but records every name."""

    def __init__(self, file: str) -> None:
        self.file = file

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == "tasks" or name.startswith("tasks."):
            self.note(name)

    def opened(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(arguments[0], str) and "/tasks/" in arguments[0]:
            self.note(arguments[0])

    def note(self, line: str) -> None:
        descriptor = os.open(self.file, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        os.write(descriptor, f"{line}\n".encode())
        os.close(descriptor)


def start_recording() -> None:
    recorder = Recorder(os.environ["WINNOW_LOADED"])
    sys.meta_path.insert(0, recorder)  # type: ignore[arg-type]
    sys.addaudithook(recorder.opened)


def run_recorded(stage: str, arguments: list[str], record: str, log: str) -> None:
    """Run a stage in this process, with the names of loaded files in `record` and its output in
    `log`."""
    assert not [name for name in sys.modules if name.partition(".")[0] == "tasks"]
    with open(log, "wb") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    os.environ |= {"WINNOW_LOADED": record, "PYTHONPATH": str(Path(__file__).parent)}
    start_recording()
    sys.argv = [f"tasks.{stage}", *arguments]
    runpy.run_module(f"tasks.{stage}", run_name="__main__", alter_sys=True)


if "WINNOW_LOADED" in os.environ:
    start_recording()
