"""A Prefect server for the time of one flow run, where no PREFECT_API_URL names a lasting one.

Prefect would start one itself, in the flow's process group: Ctrl-C would then end the server before
the flow could record that it was interrupted, and a killed flow would leave it behind. This one
stands in a group of its own and ends with the flow. It writes to the same database under
PREFECT_HOME that `prefect server start` reads."""

import atexit
import logging
import os
import socket
import subprocess
import time
import tomllib
import urllib.error
import urllib.request
from contextlib import ExitStack
from pathlib import Path

from flows import commands
from tasks.common.redaction import without_secrets

logger = logging.getLogger(__name__)

START_SECONDS = 180.0
PRIVATE = 0o077  # the umask of servers: their databases and logs are their user's alone
APP = (
    "uvicorn",
    "--factory",
    "prefect.server.api.server:create_app",
    "--log-level",
    "critical",
    "--host",
    "127.0.0.1",
)
_settings = ExitStack()  # never closed: the settings stand until the process ends
SETTINGS = {
    "PREFECT_UI_ENABLED": "false",
    "PREFECT__SERVER_EPHEMERAL": "1",
    "PREFECT__SERVER_FINAL": "1",
}


class ServerError(RuntimeError):
    """Prefect's server did not come up."""


def home() -> Path:
    """Where Prefect keeps its database and its profiles."""
    return Path(os.environ.get("PREFECT_HOME") or Path.home() / ".prefect")


def named_url() -> str | None:
    """The lasting server that PREFECT_API_URL names, in the environment or in the active profile,
    without an import of Prefect."""
    if url := os.environ.get("PREFECT_API_URL"):
        return url
    path = Path(os.environ.get("PREFECT_PROFILES_PATH") or home() / "profiles.toml")
    try:
        settings = tomllib.loads(path.read_text())
        active = os.environ.get("PREFECT_PROFILE") or settings["active"]
        return str(settings["profiles"][active]["PREFECT_API_URL"])
    except (OSError, KeyError, TypeError, tomllib.TOMLDecodeError):
        return None


def answers(url: str, seconds: float = 5.0) -> bool:
    """Whether anything answers at this address, be it with an error."""
    try:
        # the user's own PREFECT_API_URL: nothing of what answers is read
        urllib.request.urlopen(f"{url.rstrip('/')}/health", timeout=seconds).close()  # nosec B310
    except urllib.error.HTTPError:
        return True
    except (OSError, ValueError):
        return False
    return True


def provide() -> None:
    """Have a server for the rest of this process: the one that PREFECT_API_URL names, else, or
    where that one does not answer, one of our own.

    Ours ends when the process does, after Prefect's own threads have sent what they still hold.
    """
    from prefect.settings import PREFECT_API_URL, temporary_settings

    if named := PREFECT_API_URL.value():
        if answers(named):
            return
        logger.warning("%s", away(named))
    port = free_port()
    child = subprocess.Popen(
        commands.launcher(*APP, "--port", str(port)),
        cwd=commands.ROOT,
        env={**commands.environment(), **SETTINGS},
        stdin=subprocess.DEVNULL,
        process_group=0,
        umask=PRIVATE,
    )
    atexit.register(commands.end_group, child)
    url = f"http://127.0.0.1:{port}/api"
    wait_until_healthy(child, f"{url}/health")
    _settings.enter_context(temporary_settings({PREFECT_API_URL: url}))


def away(url: str) -> str:
    return (
        f"Prefect's server at {without_secrets(url)} does not answer (PREFECT_API_URL): this run "
        f"goes on, and is recorded in {home()}/prefect.db alone"
    )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until_healthy(child: "subprocess.Popen[bytes]", url: str) -> None:
    """Return when the server answers. Raises ServerError when it ends or stays silent."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and child.poll() is None:
        try:
            opener.open(url, timeout=5).close()
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.05)
    raise ServerError(
        f"Prefect's server did not start (exit status {child.poll()}): see that {home()} has room "
        "and can be written, and what `prefect server start` says"
    )
