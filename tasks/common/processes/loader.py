"""The processes of a pool, as seen by the process that uses it: the loader and its forks."""

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import psutil

from tasks.common.files import ArtifactError
from tasks.common.processes import forks
from tasks.common.processes.clock import RunningClock
from tasks.common.processes.pool_worker import memory_gb

# time limit of every reply; for the first, a loader imports libraries, possibly on a busy machine
ANSWER_SECONDS = 120.0
LOOK_SECONDS = 0.25  # between two readings of a clock
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")


class PoolError(ArtifactError):
    """Raised if a process of a pool does not become ready; the message contains the reason."""


class LoaderEnded(PoolError):
    """Raised if the loader has ended, or did not answer and was killed."""


class Loader:
    """The process that runs `module`: it loads the workers' libraries, and forks the workers. Raise
    PoolError if it does not become ready."""

    def __init__(self, module: str, configuration: bytes) -> None:
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        self.socket, theirs = socket.socketpair()
        with theirs:
            self.popen = subprocess.Popen(
                [sys.executable, "-m", module, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                env=environment,
                process_group=0,
                pass_fds=[theirs.fileno()],
            )
        try:
            self.socket.sendall(configuration)
            self.ready_message = json.loads(self.first_line())
        except (OSError, LoaderEnded) as error:
            self.close()
            limit = "" if memory_gb() < 0 else f" (`ulimit -v` allows {memory_gb():.3g} GB)"
            raise LoaderEnded(f"a worker process did not start: {error}{limit}") from error
        if "failure" in self.ready_message:
            self.close()
            raise PoolError(self.ready_message["failure"])

    def first_line(self) -> bytes:
        """Return the loader's reply to the configuration. Raise LoaderEnded if there is none."""
        clock, line = RunningClock(), b""
        while not line.endswith(b"\n"):
            if clock.read() >= ANSWER_SECONDS:
                raise LoaderEnded(f"it did not respond in {ANSWER_SECONDS:g} s")
            if select.select([self.socket], [], [], LOOK_SECONDS)[0]:
                piece = self.socket.recv(1 << 16)
                if not piece:
                    raise LoaderEnded("it ended, or closed its pipe")
                line += piece
        return line

    def is_stopped(self) -> bool:
        """Return whether the process is stopped, for example with its group or container."""
        with contextlib.suppress(psutil.Error):
            return bool(psutil.Process(self.popen.pid).status() == psutil.STATUS_STOPPED)
        return False

    def fork(self, streams: Sequence[int]) -> tuple[socket.socket, int]:
        """Fork a process with these standard streams. Return the connection to it and its pid."""
        connection, theirs = socket.socketpair()
        connection.settimeout(ANSWER_SECONDS)
        with theirs:
            try:
                socket.send_fds(self.socket, [b"+"], [theirs.fileno()])
                return connection, forks.fork(connection, None, streams)
            except BaseException:
                connection.close()
                raise

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait()
        self.socket.close()


class Process:
    """One worker process: its pending requests, oldest first, and the deadline of its next reply.
    Raise LoaderEnded if it cannot be started."""

    def __init__(self, loader: Loader, clock: RunningClock) -> None:
        self.clock = clock
        theirs_in, self.stdin = os.pipe()
        self.stdout, theirs_out = os.pipe()
        try:
            self.connection, self.pid = loader.fork((theirs_in, theirs_out, 2))
        except OSError as error:
            os.close(self.stdin)
            os.close(self.stdout)
            raise LoaderEnded(f"a worker process could not be started: {error}") from error
        finally:
            os.close(theirs_in)
            os.close(theirs_out)
        os.set_blocking(self.stdin, False)
        self.pending: deque[int] = deque()
        self.outgoing = b""  # bytes still to be written
        self.incoming = b""  # the start of the next line
        self.since = time.monotonic()  # start of the wait for the next reply
        self.cpu_since = 0.0  # the same start in CPU time ...
        self.clock_since = 0.0  # ... and on the pool's clock, which excludes pauses
        self.deadline = self.since  # time of the next check

    @property
    def idle(self) -> bool:
        return not self.pending

    def expect(self, seconds: float) -> None:
        """Start the time limit of the next reply, to be checked in `seconds` at the earliest."""
        self.since = time.monotonic()
        self.cpu_since = self.cpu_seconds()
        self.clock_since = self.clock.seconds
        self.deadline = self.since + seconds

    def cpu_seconds(self) -> float:
        """Return the CPU time of the process so far, or the pool's clock where the system does not
        report it. (psutil takes ten times as long, too long for a call per list of requests.)"""
        try:
            with open(f"/proc/{self.pid}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
        except OSError:
            return self.clock.seconds
        return (int(fields[11]) + int(fields[12])) / CLOCK_TICKS

    def write(self) -> None:
        """Write as much as the pipe accepts now. A broken pipe is noticed when replies are read."""
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            self.outgoing = self.outgoing[os.write(self.stdin, self.outgoing) :]

    def read(self) -> list[bytes] | None:
        """Return the complete lines that have arrived, or None if the process has ended."""
        piece = os.read(self.stdout, 1 << 16)
        *lines, self.incoming = (self.incoming + piece).split(b"\n")
        return lines if piece or lines else None

    def has_ended(self) -> bool:
        """Return whether an idle process has closed its reply pipe."""
        return bool(select.select([self.stdout], [], [], 0)[0])

    def kill(self) -> int | None:
        """Kill the process and everything in its group. Return its exit status as a shell reports
        it, or None if the loader has ended."""
        os.close(self.stdin)
        os.close(self.stdout)
        with self.connection, contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)
            return forks.read_number(self.connection)
        return None


def to_line(value: Any) -> bytes:
    return json.dumps(value).encode() + b"\n"
