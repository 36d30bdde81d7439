"""The processes of a pool, seen from the process that uses it: the loader and its forks.

What the loader sends while it has nothing to do are beats. They come from the group of the workers,
so they stop when the group, its container or the machine is paused. Time limits count by them: a
pause ends no request."""

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

from tasks.common.clock import BEAT_SECONDS, RunningClock
from tasks.common.files import ArtifactError
from tasks.common.pool_worker import BEAT, memory_gb

# limit of every answer: at the start a loader imports its libraries, perhaps on a busy machine
ANSWER_SECONDS = 120.0
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")


class PoolError(ArtifactError):
    """A process did not get ready; the message gives the reason."""


class LoaderEnded(PoolError):
    """The loader has ended, or gave no answer and was killed."""


class Loader:
    """The process that loads what the others need, and forks them. `clock` counts the seconds in
    which it gave signs of life. Raises PoolError if it does not get ready."""

    def __init__(self, command: Sequence[str], configuration: bytes) -> None:
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        self.socket, theirs = socket.socketpair()
        with theirs:
            self.popen = subprocess.Popen(
                [*command, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                env=environment,
                process_group=0,
                pass_fds=[theirs.fileno()],
            )
        self.clock = RunningClock()
        self.incoming = b""  # the beginning of the next line
        self.answers: deque[Any] = deque()
        try:
            self.socket.sendall(configuration)
            self.ready_message = self.answer()
        except (OSError, LoaderEnded) as error:
            self.close()
            limit = "" if memory_gb() < 0 else f" (`ulimit -v` leaves it {memory_gb():.3g} GB)"
            raise LoaderEnded(f"a worker process did not get ready: {error}{limit}") from error
        if "failure" in self.ready_message:
            self.close()
            raise PoolError(self.ready_message["failure"])

    def read(self) -> None:
        """Take what has arrived: beats, and answers. Raises LoaderEnded where nothing more
        comes."""
        with contextlib.suppress(ConnectionResetError):
            piece = self.socket.recv(1 << 16)
            if piece:
                self.clock.look()
                *lines, self.incoming = (self.incoming + piece).split(b"\n")
                self.answers.extend(line for line in map(json.loads, lines) if line != BEAT)
                return
        raise LoaderEnded("it ended, or closed its replies")

    def answer(self) -> Any:
        """Return the next answer. A loader that gives none is killed."""
        clock = RunningClock()
        while not self.answers:
            if clock.look() >= ANSWER_SECONDS:
                self.popen.kill()
                raise LoaderEnded(f"it gave no answer in {ANSWER_SECONDS:g} s")
            if select.select([self.socket], [], [], BEAT_SECONDS)[0]:
                self.read()
        return self.answers.popleft()

    def fork(self, stdin: int, stdout: int) -> int:
        """Return the pid of a new process that reads and writes these pipes."""
        socket.send_fds(self.socket, [to_line("fork")], [stdin, stdout])
        return int(self.answer())

    def wait(self, pid: int) -> int:
        """Return how a process ended, as Python's wait status."""
        self.socket.sendall(to_line(pid))
        return int(self.answer())

    def close(self) -> None:
        """Kill the loader."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait()
        self.socket.close()


class Process:
    """One worker process: its pending requests, oldest first, and when its next reply is due.
    Raises LoaderEnded when it cannot be started."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader
        theirs_in, self.stdin = os.pipe()
        self.stdout, theirs_out = os.pipe()
        try:
            self.pid = loader.fork(theirs_in, theirs_out)
        except (OSError, LoaderEnded) as error:
            os.close(self.stdin)
            os.close(self.stdout)
            raise LoaderEnded(f"a worker process could not be started: {error}") from error
        finally:
            os.close(theirs_in)
            os.close(theirs_out)
        os.set_blocking(self.stdin, False)
        self.pending: deque[int] = deque()
        self.outgoing = b""  # bytes still to be written
        self.incoming = b""  # the beginning of the next line
        self.since = time.monotonic()  # since when the next reply is awaited
        self.cpu_since = 0.0
        self.clock_since = 0.0  # by the loader's clock
        self.deadline = self.since  # when it is looked at again

    @property
    def idle(self) -> bool:
        """Whether the process has no pending requests."""
        return not self.pending

    def expect(self, seconds: float) -> None:
        """Start the time of the next reply."""
        self.since = time.monotonic()
        self.cpu_since = self.cpu_seconds()
        self.clock_since = self.loader.clock.seconds
        self.deadline = self.since + seconds

    def cpu_seconds(self) -> float:
        """Return the CPU time of the process so far; where the system does not tell, the clock."""
        try:
            with open(f"/proc/{self.pid}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
        except OSError:
            return self.loader.clock.seconds
        return (int(fields[11]) + int(fields[12])) / CLOCK_TICKS

    def cpu_seconds_spent(self) -> float:
        """Return the CPU time since the next reply is awaited."""
        return self.cpu_seconds() - self.cpu_since

    def clock_seconds_spent(self) -> float:
        """Return the time on the clock since the next reply is awaited, pauses left out."""
        return self.loader.clock.seconds - self.clock_since

    def write(self) -> None:
        """Write as much as the pipe takes now. A broken pipe shows up as the end of its replies."""
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            self.outgoing = self.outgoing[os.write(self.stdin, self.outgoing) :]

    def read(self) -> list[bytes] | None:
        """Return the complete lines that have arrived, or None when the process has ended."""
        piece = os.read(self.stdout, 1 << 16)
        *lines, self.incoming = (self.incoming + piece).split(b"\n")
        return lines if piece or lines else None

    def has_ended(self) -> bool:
        """Whether an idle process has closed its replies."""
        return bool(select.select([self.stdout], [], [], 0)[0])

    def kill(self) -> int | None:
        """Kill the process and everything in its group; return how it ended, None if the loader
        cannot tell."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        os.close(self.stdin)
        os.close(self.stdout)
        with contextlib.suppress(OSError, ValueError, LoaderEnded):
            return self.loader.wait(self.pid)
        return None


def to_line(value: Any) -> bytes:
    """Return a value as a line of JSON."""
    return json.dumps(value).encode() + b"\n"
