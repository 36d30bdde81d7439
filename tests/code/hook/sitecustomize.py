"""Record the files of this project that a process and its children load.

Python imports a module of this name automatically when it starts. Only the processes of
`test_loaded` have it on their path."""

import os
import sys
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


if "WINNOW_LOADED" in os.environ:
    recorder = Recorder(os.environ["WINNOW_LOADED"])
    sys.meta_path.insert(0, recorder)  # type: ignore[arg-type]
    sys.addaudithook(recorder.opened)
