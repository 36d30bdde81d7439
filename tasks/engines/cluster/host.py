"""One process on some machine of a cluster: started, watched and ended there on behalf of another
machine. Ray runs an object of this class in each place that was reserved; nothing here knows Ray.

The process ends with the object's own process: a rank because it asks the kernel for it
(`common/parent.py`), a server because of its guard (`server/guard.py`)."""

import os
import platform
import signal
import socket
import subprocess
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path

from tasks.common.files import temporary_folder
from tasks.common.parent import PARENT

SCRATCH, ADDRESS = "{scratch}", "{address}"
PIECE = 2**16  # bytes of output in one answer
TAIL = 2_000  # characters of output in an error


@dataclass(frozen=True)
class Place:
    """A machine: its name, and the address that the other machines reach it by."""

    machine: str
    address: str


@dataclass(frozen=True)
class Look:
    """What a process is at: its exit status once it has ended, and what it has written since."""

    status: int | None
    output: bytes


class Host:
    """At most one process at a time."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.process: subprocess.Popen[bytes] | None = None
        self.files = ExitStack()
        self.folder = self.files.enter_context(temporary_folder(None, "winnow-host"))
        self.log = self.folder / "log"
        self.num_read = 0

    def place(self) -> Place:
        return Place(platform.node(), self.address)

    def free_port(self) -> int:
        """A port of this machine that nothing listens on."""
        with socket.socket() as probe:
            probe.bind((self.address, 0))
            return int(probe.getsockname()[1])

    def reads(self, path: str, content: str) -> bool:
        """Whether this machine reads the same in a file as the one that wrote it."""
        try:
            return Path(path).read_text() == content
        except OSError:
            return False

    def start(
        self, command: list[str], environment: dict[str, str], folder: str, *, is_guarded: bool
    ) -> None:
        """Start `command` in `folder`, with what is this host's for every SCRATCH and ADDRESS in
        it and its environment. What it writes is kept for `look`. Raises OSError where it cannot be
        started, and RuntimeError when one runs already."""
        if self.process is not None and self.process.poll() is None:
            raise RuntimeError("a process runs here already")
        own = {
            key: os.environ[key] for key in ("CUDA_VISIBLE_DEVICES",) if key in os.environ
        }  # Ray has chosen these GPUs for this place
        filled = {key: self.filled_in(value) for key, value in environment.items()}
        # When it ends, Ray kills its own children, and not theirs: the guard must be none of them,
        # or it could not end the rest.
        before = ["setsid", "--fork", "--wait"] if is_guarded else []
        # Ray blocks interrupts in its own processes, and a new process has its parent's mask.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
        with self.log.open("ab") as output:
            self.process = subprocess.Popen(
                [*before, *map(self.filled_in, command)],
                cwd=folder,
                env={**filled, **own, PARENT: str(os.getpid())},
                stdin=subprocess.PIPE if is_guarded else subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def filled_in(self, part: str) -> str:
        return part.replace(SCRATCH, str(self.folder)).replace(ADDRESS, self.address)

    def look(self) -> Look:
        """The status, and the next output that nobody has read."""
        status = None if self.process is None else self.process.poll()
        if not self.log.exists():
            return Look(status, b"")
        with self.log.open("rb") as file:
            file.seek(self.num_read)
            output = file.read(PIECE)
        self.num_read += len(output)
        return Look(status, output)

    def tail(self) -> str:
        """The end of all output."""
        if not self.log.exists():
            return ""
        with self.log.open("rb") as file:
            file.seek(max(self.log.stat().st_size - TAIL, 0))
            return file.read().decode(errors="replace")

    def read(self, name: str) -> str | None:
        """A file that the process wrote into this host's folder; None where it has not yet."""
        path = self.folder / name
        return path.read_text() if path.exists() else None

    def interrupt(self) -> None:
        """Ask the process to stop."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)

    def end(self) -> None:
        """Kill the process and all that it has started, wait for it, and remove its files. A host
        that was ended starts nothing again."""
        if self.process is not None:
            if self.process.stdin is not None:
                self.process.stdin.close()  # its guard ends the rest
            else:
                with suppress(ProcessLookupError):
                    os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self.files.close()
