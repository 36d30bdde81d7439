"""Processes that start in tenths of a second: forks of a process that has imported their libraries.

A fork server creates a fork for every connection. Over that connection it sends the fork's pid, and
later its exit status. Stages connect to a socket with an address; for the workers of a pool, the
connections are sent through a socket pair. If a client closes its connection or dies, its fork is
killed; if the server is killed, the kernel kills its forks.

Stages: torch and transformers take four seconds to import. A flow therefore starts a server,
`python -m flows.pipeline.launch PID forks ADDRESS`, and passes ADDRESS to the stages in
WINNOW_FORKS. A stage's command sends its arguments, folder, environment and standard streams to the
server (`run_forked`), waits, and exits with the status of the fork, which runs the stage. None of
the stages' own code is imported before the fork. An interrupt reaches the whole process group,
including the fork. This works only on Linux without a GPU, because a GPU driver's state does not
survive a fork, and the seconds saved are negligible compared with a GPU's work. Elsewhere, or if no
server responds, the command runs the stage itself."""

import contextlib
import gc
import importlib
import json
import os
import runpy
import selectors
import signal
import socket
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.common.processes.ending import PARENT, exit_interrupted

ADDRESS = "WINNOW_FORKS"
LIBRARIES = (
    "transformers.models.qwen3.modeling_qwen3",
    "sqlalchemy.orm",
    "alembic.command",
    "fastapi",
)
"""Excludes polars, and mlflow, which imports it: polars starts threads, which do not survive a
fork."""
STREAMS = (0, 1, 2)
LENGTH = 8  # bytes of a number: a request's length, a pid, a status
KILLED = 128  # plus the signal's number, as in a shell


def are_possible() -> bool:
    """Return whether stages may be forked on this machine."""
    return sys.platform == "linux" and not any(
        Path(driver).exists() for driver in ("/dev/nvidiactl", "/dev/kfd")
    )


# ------------------------------------------------------------------------------------- the client


def run_forked(module: str) -> int | None:
    """Run `python -m module` with this command's arguments as a fork of the server. Return its exit
    status, or None if no server responds."""
    address = os.environ.get(ADDRESS)
    if not address:
        return None
    with socket.socket(socket.AF_UNIX) as server:
        environment = {name: value for name, value in os.environ.items() if name != ADDRESS}
        try:
            server.connect(address)
            pid = fork(server, [module, sys.argv[1:], os.getcwd(), environment], STREAMS)
        except OSError:  # no server, or it failed to import the libraries
            return None
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the fork is in this process group
        signal.signal(signal.SIGTERM, lambda *_: os.kill(pid, signal.SIGTERM))
        status = read_number(server)
    return KILLED + signal.SIGKILL if status is None else status


def fork(server: socket.socket, task: Any, streams: Sequence[int]) -> int:
    """Request a fork with `task`, a JSON value, and these standard streams, and return its pid.
    Raise OSError if the server ends first. A server creates no fork for a partial request."""
    request = json.dumps(task).encode()
    socket.send_fds(server, [len(request).to_bytes(LENGTH)], streams)
    server.sendall(request)
    pid = read_number(server)
    if pid is None:
        raise ConnectionResetError("it ended")
    return pid


def read_number(server: socket.socket) -> int | None:
    """Return the next number from the server, or None if it has ended."""
    with contextlib.suppress(ConnectionResetError):
        answer = server.recv(LENGTH, socket.MSG_WAITALL)
        return int.from_bytes(answer) if answer else None
    return None


# ------------------------------------------------------------------------------------- the server


@dataclass(frozen=True)
class ForkRequest:
    """The task of a fork, its standard streams, and the pid of its server."""

    task: Any
    streams: list[int]
    server: int

    @classmethod
    def receive(cls, connection: socket.socket) -> "ForkRequest":
        """Read a request from a new connection. Raise OSError or ValueError if it is incomplete."""
        length, streams, _, _ = socket.recv_fds(connection, LENGTH, len(STREAMS))
        try:
            with connection.makefile("rb") as file:
                task = json.loads(file.read(int.from_bytes(length)))
                return cls(task, streams, os.getpid())
        except (OSError, ValueError):
            for stream in streams:
                os.close(stream)
            raise

    def take_streams(self) -> None:
        """Replace this process's standard streams with the request's streams."""
        for stream, given in zip(STREAMS, self.streams, strict=True):
            os.dup2(given, stream)
            os.close(given)

    def become_stage(self) -> None:
        """Run the requested stage here. Raise SystemExit with its status, as the stage does."""
        module, arguments, folder, environment = self.task
        self.take_streams()
        os.environ.clear()
        os.environ.update(environment)
        os.environ[PARENT] = str(self.server)
        os.chdir(folder)
        sys.argv = [module, *arguments]
        runpy.run_module(module, run_name="__main__", alter_sys=True)


@dataclass(frozen=True)
class Fork:
    """A fork that is not yet reaped: its pid, and its connection."""

    pid: int
    connection: socket.socket

    def has_ended(self) -> bool:
        """Return whether the fork has ended. It stays a zombie, so that no other process gets its
        pid, which may also be the id of its process group."""
        return os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None

    def end(self) -> None:
        """Kill the processes that remain in the fork's group, if it created one, reap the fork, and
        send its exit status to the client."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        _, status = os.waitpid(self.pid, 0)
        code = os.waitstatus_to_exitcode(status)
        with contextlib.suppress(OSError), self.connection:
            self.connection.sendall((code if code >= 0 else KILLED - code).to_bytes(LENGTH))


def serve_stages(address: str, libraries: Iterable[str] = LIBRARIES) -> None:
    """Serve stages at a socket until this process ends. In a fork this function exits with
    SystemExit."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # only the stages of this process group handle it
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        request = serve(listener, libraries)
    request.become_stage()


def serve(listener: socket.socket, libraries: Iterable[str] = ()) -> ForkRequest:
    """Create a fork for every connection until this process ends. Return only in the forks, with
    the request of each.

    `libraries` are imported at the first connection, so a flow that forks no stage imports none."""
    forks: dict[int, Fork] = {}
    woken, wake = socket.socketpair()
    wake.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake.fileno(), warn_on_full_buffer=False)
    with woken, wake, selectors.DefaultSelector() as events:
        events.register(listener, selectors.EVENT_READ)
        events.register(woken, selectors.EVENT_READ)
        while True:
            for key, _ in events.select():
                if key.fileobj is listener:
                    connection = next_connection(listener)
                    for name in libraries:
                        importlib.import_module(name)
                    gc.freeze()  # garbage collection in a fork skips the shared pages
                    request = answer(connection, forks, events)
                    if request:
                        return request
                elif key.fileobj is woken:
                    woken.recv(1 << 12)
                    for ended in [each for each in forks.values() if each.has_ended()]:
                        del forks[ended.pid]
                        unregister(events, ended.connection)
                        ended.end()
                else:  # the client is gone: kill its fork, which is reaped above
                    unregister(events, key.fileobj)
                    left = [fork for fork in forks.values() if fork.connection is key.fileobj]
                    for running in left:
                        os.kill(running.pid, signal.SIGKILL)


def next_connection(listener: socket.socket) -> socket.socket:
    """Return the next connection to a listening socket, or the next one sent over a socket pair.
    Exit this process if the other end of the pair is closed."""
    if listener.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        return listener.accept()[0]
    _, descriptors, _, _ = socket.recv_fds(listener, 1, 1)
    if not descriptors:
        sys.exit()
    return socket.socket(fileno=descriptors[0])


def answer(
    connection: socket.socket, forks: dict[int, Fork], events: selectors.BaseSelector
) -> ForkRequest | None:
    """Create a fork for one connection. Return the request in the fork, and None in the server."""
    try:
        request = ForkRequest.receive(connection)
    except (OSError, ValueError):  # the client was killed
        connection.close()
        return None
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # block it until its handler is set
    pid = os.fork()
    if pid == 0:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, exit_interrupted)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        connection.close()
        for other in forks.values():
            other.connection.close()
        return request
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    for stream in request.streams:
        os.close(stream)
    forks[pid] = Fork(pid, connection)
    events.register(connection, selectors.EVENT_READ)
    with contextlib.suppress(OSError):
        connection.sendall(pid.to_bytes(LENGTH))
    return None


def unregister(events: selectors.BaseSelector, file: Any) -> None:
    """Stop watching `file`; ignore a closed or unknown one."""
    with contextlib.suppress(KeyError, ValueError):
        events.unregister(file)
