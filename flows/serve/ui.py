"""winnow ui: the pages of Prefect and of MLflow, on loopback, until Ctrl-C.

Prefect's server shows the runs of the flow and runs schedules; MLflow shows every stage that ran.
If PREFECT_API_URL or tracking.uri names another server, its address is printed and none is started.
With --prefect-host other machines can reach Prefect's server, which then requires a password. With
--login it requires a password on loopback, too, for machines with several users. No server sends
telemetry (see `flows.QUIET`). Both servers end with this process, even if it is killed."""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import BinaryIO

from flows.pipeline import commands, summary
from flows.serve import server
from tasks.common import params
from tasks.common.files import ArtifactError, make_private_folder
from tasks.common.layout import Layout
from tasks.common.processes import ending
from tasks.common.processes.guard import guarded
from tasks.common.processes.ports import LOOPBACK
from tasks.common.tracking import database, runs
from tasks.common.tracking.settings import Tracking

LAYOUT = Layout(commands.ROOT / "data")
POLL_SECONDS = 0.1
LAST_LINES = 20
GRACE_SECONDS = 10.0  # time for a server to end by itself
HOW_TO_LOG_IN = (
    "Prefect requires the password in {file}; flows, schedules and workers also need it:\n"
    "    export PREFECT_API_AUTH_STRING=$(cat {file})"
)


@dataclass(frozen=True)
class Server:
    """A server: its `python -m` arguments, its address, and a path that responds once it is up."""

    name: str
    arguments: tuple[str, ...]
    host: str
    port: int
    health: str
    settings: dict[str, str] = field(default_factory=dict)

    @property
    def page(self) -> str:
        return f"http://{self.host}:{self.port}"


def add_options(parser: argparse.ArgumentParser) -> None:
    server.add_port(parser)
    parser.add_argument(
        "--prefect-host",
        default=server.HOST,
        metavar="ADDRESS",
        help="address of this machine for others; default: %(default)s, only this machine",
    )
    parser.add_argument("--login", action="store_true", help="require a password for Prefect")
    parser.add_argument("--mlflow-port", type=int, default=5000, help="default: %(default)s")


def run(options: argparse.Namespace) -> int:
    """Serve until interrupted. Return 0, or raise ArtifactError if a server exits by itself."""
    auth = auth_of(options)
    lasting, started = servers(options, auth)
    for one in started:
        server.check_port(one.name, one.host, one.port)
    with ExitStack() as stack:
        running = [(one, *stack.enter_context(serving(one))) for one in started]
        try:
            for one, child, log in running:
                wait_until_up(one, child, log)
            own = next((f"{one.page}/api" for one in started if one.name == "Prefect"), None)
            latest = latest_run(own, auth)
            pages = {"Prefect": lambda: latest, "MLflow": lambda: runs.page(*record())}
            own_pages = [(one.name, f"{one.page}/{pages[one.name]()}") for one in started]
            for name, page in [*lasting, *own_pages]:
                print(f"{name:9} {page}", flush=True)
            if own and auth:
                print(HOW_TO_LOG_IN.format(file=server.auth_file()), flush=True)
            if running:
                print("Ctrl-C stops both" if len(running) > 1 else "Ctrl-C stops it", flush=True)
            while running:
                for one, child, log in running:
                    if child.poll() is not None:
                        raise ArtifactError(f"{one.name} has ended by itself:\n{tail(log)}")
                time.sleep(POLL_SECONDS)
        except KeyboardInterrupt:
            print("stopping ...", flush=True)
            return ending.interrupted(0)
    return 0


def auth_of(options: argparse.Namespace) -> str | None:
    """Return the USER:PASSWORD that Prefect requires, if any. Raise ArtifactError for a wildcard
    address, such as 0.0.0.0."""
    if not options.prefect_host.strip("0.:"):
        raise ArtifactError(
            f"--prefect-host {options.prefect_host}: use one address, by which others reach this "
            "machine; requests by another name are refused"
        )
    is_reached = options.prefect_host not in LOOPBACK
    return server.kept_auth() if options.login or is_reached else None


def latest_run(url: str | None, auth: str | None) -> str:
    """Mark killed runs as crashed in Prefect, and return the path of the page of the project's
    latest run, or of all runs. `url` and `auth` are those of a server started here, if any."""
    from prefect import get_client
    from prefect.client.schemas.filters import FlowFilter, FlowFilterName
    from prefect.client.schemas.sorting import FlowRunSort
    from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings

    from flows.pipeline import crashes, records

    own = {PREFECT_API_URL: url} if url else {}
    password = {PREFECT_API_AUTH_STRING: auth} if url and auth else {}
    with temporary_settings({**own, **password}):
        records.attempt(crashes.mark)
        with suppress(Exception), get_client(sync_client=True) as client:  # any answer is possible
            own_flow = FlowFilter(name=FlowFilterName(any_=[commands.NAME]))
            order = FlowRunSort.EXPECTED_START_TIME_DESC
            (run,) = client.read_flow_runs(flow_filter=own_flow, sort=order, limit=1)
            return f"runs/flow-run/{run.id}"
    return "runs"


def servers(
    options: argparse.Namespace, auth: str | None
) -> tuple[list[tuple[str, str]], list[Server]]:
    """Return (name, page) of the servers that the settings name, and the servers to start."""
    lasting, started = [], []
    url, host, port = server.named_url(), options.prefect_host, options.prefect_port
    start, settings = server.arguments(host, port, "warning"), server.settings(host, auth)
    own = Server("Prefect", start, host, port, "api/health", settings)
    if url and (not url.startswith(f"{own.page}/") or server.answers(url)):
        server.warn_if_open(url)
        lasting.append(("Prefect", summary.page_of(url)))
    else:
        started.append(own)
    uri, name = record()
    if uri.startswith(("http://", "https://")):
        lasting.append(("MLflow", f"{uri.rstrip('/')}/{runs.page(uri, name)}"))
    else:
        listen = (server.HOST, options.mlflow_port)
        start = server.arguments(*listen, "warning", "mlflow")
        started.append(Server("MLflow", start, *listen, "health", database.environment(uri)))
    return lasting, started


def record() -> tuple[str, str]:
    """Return the URI of the project's record of runs, and the name of its experiment."""
    tracking = params.section(params.load(commands.ROOT / "params.yaml"), "tracking", Tracking)
    return tracking.uri or f"sqlite:///{LAYOUT.tracking / 'mlflow.db'}", tracking.experiment


@contextmanager
def serving(one: Server) -> Iterator[tuple["subprocess.Popen[bytes]", BinaryIO]]:
    """Start the server and yield its process and its log; stop the server after the block."""
    make_private_folder(LAYOUT.tracking)
    with tempfile.TemporaryFile() as log:
        child = subprocess.Popen(
            guarded([sys.executable, "-m", *one.arguments], GRACE_SECONDS),
            cwd=commands.ROOT,
            # MLflow runs no jobs here
            env={**commands.environment(), "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
            | one.settings,
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


def wait_until_up(one: Server, child: "subprocess.Popen[bytes]", log: BinaryIO) -> None:
    """Wait until the server responds. Raise ArtifactError if it exits or takes too long."""
    if not server.comes_up(child, f"{one.page}/{one.health}"):
        what = "did not answer" if child.poll() is None else "did not start"
        raise ArtifactError(f"{one.name} {what}; the end of its log:\n{tail(log)}")


def tail(log: BinaryIO) -> str:
    size = os.fstat(log.fileno()).st_size
    text = os.pread(log.fileno(), 1 << 16, max(size - (1 << 16), 0)).decode(errors="replace")
    return "\n".join(text.splitlines()[-LAST_LINES:])
