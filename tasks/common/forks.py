"""Stages that start in tenths of a second: forks of one process that has imported their libraries.

torch and transformers take four seconds to import. A flow therefore starts a server, `python -m
flows.launch PID forks ADDRESS`, and names its socket to the stages in WINNOW_FORKS. A stage's
command sends its arguments, folder, environment and standard streams there (`run_forked`). The
server imports the libraries once, forks, and the fork becomes the stage. None of the project's own
code is imported before the fork.

The command waits for the fork and leaves with its status. When the command is killed, so is the
fork; when the server is killed, the kernel kills its forks. An interrupt reaches the whole process
group, and with it the fork. Linux without a GPU only: there, and where no server answers, the
command does the work itself (a driver's state does not survive a fork, and beside a GPU's work the
seconds do not count)."""

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
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.common.parent import PARENT

ADDRESS = "WINNOW_FORKS"
LIBRARIES = (
    "transformers.models.qwen3.modeling_qwen3",
    "sklearn.linear_model",
    "sqlalchemy.orm",
    "alembic.command",
    "fastapi",
)
"""Not polars, nor mlflow, which imports it: polars starts threads, and they do not survive a
fork."""
STREAMS = (0, 1, 2)
LENGTH = 8  # bytes of a number: a request's length, a pid, a status
KILLED = 128  # and the signal's number, as a shell says it


def are_possible() -> bool:
    """Whether stages may be forked on this machine."""
    return sys.platform == "linux" and not any(
        Path(driver).exists() for driver in ("/dev/nvidiactl", "/dev/kfd")
    )


# ---------------------------------------------------------------------------- the stage's command


def run_forked(module: str) -> int | None:
    """Run `python -m module` with this command's arguments as a fork of the server; its exit
    status, or None where no server answers."""
    address = os.environ.get(ADDRESS)
    if not address:
        return None
    with socket.socket(socket.AF_UNIX) as server:
        environment = {name: value for name, value in os.environ.items() if name != ADDRESS}
        request = json.dumps([module, sys.argv[1:], os.getcwd(), environment]).encode()
        try:
            server.connect(address)
            socket.send_fds(server, [len(request).to_bytes(LENGTH)], STREAMS)
            server.sendall(request)
        except OSError:  # there is none, or it is ending: half a request runs nothing
            return None
        pid = read_number(server)
        if pid is None:  # it could not import the libraries
            return None
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the fork is in this process group
        signal.signal(signal.SIGTERM, lambda *_: os.kill(pid, signal.SIGTERM))
        status = read_number(server)
    return KILLED + signal.SIGKILL if status is None else status


def read_number(server: socket.socket) -> int | None:
    """The next number that the server sends, or None when it has ended."""
    with contextlib.suppress(ConnectionResetError):
        answer = server.recv(LENGTH, socket.MSG_WAITALL)
        return int.from_bytes(answer) if answer else None
    return None


# ------------------------------------------------------------------------------------- the server


@dataclass(frozen=True)
class ForkRequest:
    """What a command asks for: the module, its arguments and environment, and its streams."""

    module: str
    arguments: list[str]
    folder: str
    environment: dict[str, str]
    streams: list[int]

    @classmethod
    def receive(cls, connection: socket.socket) -> "ForkRequest":
        """Read one from a fresh connection. Raises OSError or ValueError where it is cut short."""
        length, streams, _, _ = socket.recv_fds(connection, LENGTH, len(STREAMS))
        try:
            with connection.makefile("rb") as file:
                module, arguments, folder, environment = json.loads(
                    file.read(int.from_bytes(length))
                )
        except (OSError, ValueError):
            for stream in streams:
                os.close(stream)
            raise
        environment[PARENT] = str(os.getpid())
        return cls(module, arguments, folder, environment, streams)

    def become(self) -> None:
        """Turn this process into the stage. Returns by SystemExit, as the module does."""
        for stream, given in zip(STREAMS, self.streams, strict=True):
            os.dup2(given, stream)
            os.close(given)
        os.environ.clear()
        os.environ.update(self.environment)
        os.chdir(self.folder)
        sys.argv = [self.module, *self.arguments]
        runpy.run_module(self.module, run_name="__main__", alter_sys=True)


@dataclass(frozen=True)
class Fork:
    """A running stage: its pid, a descriptor that becomes readable when it ends, and the connection
    of the command that waits for it."""

    pid: int
    descriptor: int
    connection: socket.socket

    def end(self) -> None:
        """Reap it, and tell its command the status."""
        _, status = os.waitpid(self.pid, 0)
        code = os.waitstatus_to_exitcode(status)
        with contextlib.suppress(OSError), self.connection:
            self.connection.sendall((code if code >= 0 else KILLED - code).to_bytes(LENGTH))
        os.close(self.descriptor)


def serve(address: str, libraries: Iterable[str] = LIBRARIES) -> ForkRequest:
    """Fork once for every command that connects to the socket `address`, for as long as this
    process lives. Returns in the forks only, each with what it is to become.

    `libraries` are imported when the first command comes: a flow that runs no such stage pays
    nothing."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # meant for the stages of this process group
    forks: dict[int, Fork] = {}
    with selectors.DefaultSelector() as events, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        events.register(listener, selectors.EVENT_READ)
        while True:
            for key, _ in events.select():
                if key.fileobj is listener:
                    connection = listener.accept()[0]
                    for name in libraries:
                        importlib.import_module(name)
                    gc.freeze()  # a fork's collections leave the shared pages alone
                    request = fork(connection, forks, events)
                    if request:
                        return request
                elif isinstance(key.fileobj, int) and key.fd in forks:
                    ended = forks.pop(key.fd)
                    unregister(events, ended.descriptor)
                    unregister(events, ended.connection)
                    ended.end()
                else:  # a command is gone: its stage goes too, and is reaped above
                    unregister(events, key.fileobj)
                    for running in forks.values():
                        if running.connection is key.fileobj:
                            os.kill(running.pid, signal.SIGKILL)


def fork(
    connection: socket.socket, forks: dict[int, Fork], events: selectors.BaseSelector
) -> ForkRequest | None:
    """Answer one command: in the fork the request, in the server None."""
    try:
        request = ForkRequest.receive(connection)
    except (OSError, ValueError):  # killed while it asked
        connection.close()
        return None
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # none is lost before its handler is
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        connection.close()
        for other in forks.values():
            other.connection.close()
            os.close(other.descriptor)
        return request
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    for stream in request.streams:
        os.close(stream)
    started = Fork(pid, os.pidfd_open(pid), connection)
    forks[started.descriptor] = started
    events.register(started.descriptor, selectors.EVENT_READ)
    events.register(connection, selectors.EVENT_READ)
    with contextlib.suppress(OSError):
        connection.sendall(pid.to_bytes(LENGTH))
    return None


def unregister(events: selectors.BaseSelector, file: Any) -> None:
    """Listen to `file` no longer; one that is closed or gone already is none."""
    with contextlib.suppress(KeyError, ValueError):
        events.unregister(file)
