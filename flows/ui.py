"""winnow ui: the pages of Prefect and of MLflow, on loopback, until Ctrl-C.

Prefect's server shows the runs of the flow and keeps schedules; MLflow shows every stage that ran.
Where PREFECT_API_URL or tracking.uri names a server, its address is printed and none is started.
Nothing phones home (see `flows.QUIET`). However this ends, both end with it."""

import argparse
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from flows import commands, guarded, server
from tasks.common import params, process
from tasks.common.files import ArtifactError, make_private_folder
from tasks.common.layout import Layout
from tasks.common.redaction import without_secrets

LAYOUT = Layout(commands.ROOT / "data")
HOST = "127.0.0.1"
START_SECONDS = 180.0
POLL_SECONDS = 0.1
LAST_LINES = 20


class PageError(ArtifactError):
    """A server did not come up."""


@dataclass(frozen=True)
class Server:
    """One server: its command, where it answers when it is up, and the page for people."""

    name: str
    arguments: tuple[str, ...]
    health: str
    page: str
    port: int


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prefect-port", type=int, default=4200, help="default: %(default)s")
    parser.add_argument("--mlflow-port", type=int, default=5000, help="default: %(default)s")


def run(options: argparse.Namespace) -> int:
    """Serve until interrupted: 0, or 1 when a server ended by itself."""
    lasting, started = servers(options.prefect_port, options.mlflow_port)
    for one in started:
        check_port(one)
    with ExitStack() as stack:
        running = [(one, *stack.enter_context(serving(one))) for one in started]
        try:
            for one, child, log in running:
                wait_until_up(one, child, log)
            mark_crashes(
                next((f"{one.page}/api" for one in started if one.name == "Prefect"), None)
            )
            for name, page in [*lasting, *((one.name, one.page) for one in started)]:
                print(f"{name:9} {page}", flush=True)
            if running:
                print("Ctrl-C stops both" if len(running) > 1 else "Ctrl-C stops it", flush=True)
            while running:
                for one, child, log in running:
                    if child.poll() is not None:
                        raise PageError(f"{one.name} has ended by itself:\n{tail(log)}")
                time.sleep(POLL_SECONDS)
        except KeyboardInterrupt:
            print("stopping ...", flush=True)
            return process.interrupted(0)
    return 0


def mark_crashes(url: str | None) -> None:
    """Have Prefect show as crashed what was killed. `url` is that of a server started here."""
    from prefect.settings import PREFECT_API_URL, temporary_settings

    from flows import crashes, records

    with temporary_settings({PREFECT_API_URL: url} if url else {}):
        records.attempt(crashes.mark)


def servers(prefect_port: int, mlflow_port: int) -> tuple[list[tuple[str, str]], list[Server]]:
    """(name, page) of the servers that are there already, and those to start."""
    lasting, started = [], []
    if url := server.named_url():
        lasting.append(("Prefect", without_secrets(url).rstrip("/").removesuffix("/api")))
    else:
        started.append(prefect(prefect_port))
    tracking = params.load(commands.ROOT / "params.yaml").get("tracking") or {}
    uri = tracking.get("uri") or f"sqlite:///{LAYOUT.tracking / 'mlflow.db'}"
    if uri.startswith(("http://", "https://")):
        lasting.append(("MLflow", uri))
    else:
        started.append(mlflow(mlflow_port, uri))
    return lasting, started


def prefect(port: int) -> Server:
    page = f"http://{HOST}:{port}"
    start = ("prefect", "server", "start", "--host", HOST, "--port", str(port))
    return Server("Prefect", start, f"{page}/api/health", page, port)


def mlflow(port: int, uri: str) -> Server:
    page = f"http://{HOST}:{port}"
    where = ("--backend-store-uri", uri, "--host", HOST, "--port", str(port), "--workers", "1")
    return Server("MLflow", ("mlflow", "ui", *where), f"{page}/health", page, port)


def check_port(one: Server) -> None:
    """Raise PageError where something else listens: its answers would pass for the server's."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, one.port))
        except OSError as error:
            raise PageError(
                f"port {one.port} is in use: {one.name} may be up already ({one.page}); or give "
                f"another with --{one.name.lower()}-port"
            ) from error


@contextmanager
def serving(one: Server) -> Iterator[tuple["subprocess.Popen[bytes]", BinaryIO]]:
    """The server's process and its log, for as long as the block lasts."""
    make_private_folder(LAYOUT.tracking)
    with tempfile.TemporaryFile() as log:
        child = subprocess.Popen(
            [sys.executable, "-P", str(Path(guarded.__file__)), *module(*one.arguments)],
            cwd=commands.ROOT,
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            umask=server.PRIVATE,
        )
        assert child.stdin is not None
        try:
            yield child, log
        finally:
            child.stdin.close()
            child.wait()


def module(*arguments: str) -> list[str]:
    return [sys.executable, "-m", *arguments]


def environment() -> dict[str, str]:
    """The flow's, privacy switches included; MLflow needs no runner of jobs here."""
    return {**commands.environment(), "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}


def wait_until_up(one: Server, child: "subprocess.Popen[bytes]", log: BinaryIO) -> None:
    """Return when the server answers. Raises PageError when it ends or stays silent."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and child.poll() is None:
        try:
            opener.open(one.health, timeout=5).close()
            return
        except (urllib.error.URLError, OSError):
            time.sleep(POLL_SECONDS)
    what = "did not answer" if child.poll() is None else "did not start"
    raise PageError(f"{one.name} {what}; its last words:\n{tail(log)}")


def tail(log: BinaryIO) -> str:
    """The last lines of a log."""
    size = os.fstat(log.fileno()).st_size
    text = os.pread(log.fileno(), 1 << 16, max(size - (1 << 16), 0)).decode(errors="replace")
    return "\n".join(text.splitlines()[-LAST_LINES:])
