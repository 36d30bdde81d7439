"""Start, watch and stop one process on a machine of a cluster, from another machine. Ray runs a
`Host` in each reserved place, but nothing here imports Ray.

If the host's own process dies, the process it started dies, too: the kernel kills a rank
(`common/processes/ending.py`), and a guard kills a server (`common/processes/guard.py`)."""

import os
import platform
import signal
import subprocess
from contextlib import ExitStack, suppress
from dataclasses import dataclass

from tasks.common.files import temporary_folder
from tasks.common.processes import ports
from tasks.common.processes.ending import PARENT

SCRATCH, ADDRESS = "{scratch}", "{address}"
PIECE = 2**16  # bytes of output in one answer


@dataclass(frozen=True)
class Place:
    """A machine of the cluster: its name, and its address for the other machines."""

    machine: str
    address: str


@dataclass(frozen=True)
class Progress:
    """A process's exit status (None while it runs), and at most PIECE bytes of new output."""

    status: int | None
    output: bytes


class Host:
    """Starts, polls and stops one process on this machine."""

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
        """Return a free port on this machine."""
        return ports.free_port(self.address)

    def has_folder(self, path: str) -> bool:
        """Return whether this machine can read the folder at `path`."""
        return os.access(path, os.R_OK | os.X_OK)

    def start(
        self, command: list[str], environment: dict[str, str], folder: str, *, is_guarded: bool
    ) -> None:
        """Start `command` in `folder`. In the command and the environment, replace SCRATCH and
        ADDRESS with this host's folder and address. The output is kept for `poll`. Raise OSError if
        the command cannot be started."""
        own = {
            key: os.environ[key] for key in ("CUDA_VISIBLE_DEVICES",) if key in os.environ
        }  # Ray has chosen these GPUs for this place
        filled = {key: self.filled_in(value) for key, value in environment.items()}
        # When Ray ends, it kills its own children, but not their children. The guard must not be a
        # child of Ray, or it could not end the server.
        before = ["setsid", "--fork", "--wait"] if is_guarded else []
        # Ray blocks interrupts in its own processes, and a new process inherits the signal mask.
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

    def poll(self) -> Progress:
        """Return the process's exit status, and at most PIECE bytes of its next output."""
        status = None if self.process is None else self.process.poll()
        if not self.log.exists():
            return Progress(status, b"")
        with self.log.open("rb") as file:
            file.seek(self.num_read)
            output = file.read(PIECE)
        self.num_read += len(output)
        return Progress(status, output)

    def read(self, name: str) -> str | None:
        """Return the text of a file that the process wrote into this host's folder, or None if the
        file does not exist yet."""
        path = self.folder / name
        return path.read_text() if path.exists() else None

    def interrupt(self) -> None:
        """Send SIGTERM to the process."""
        if self.process is not None and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)

    def end(self) -> None:
        """Kill the process and its process group, wait for it, and remove its files. After that,
        the host cannot start another process."""
        if self.process is not None:
            if self.process.stdin is not None:
                self.process.stdin.close()  # its guard ends the rest
            else:
                with suppress(ProcessLookupError):
                    os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        self.files.close()
