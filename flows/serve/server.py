"""Prefect servers: finding the one that PREFECT_API_URL names, and starting Winnow's own servers.

Anyone who can write to a Prefect server can run code wherever it schedules runs. So Winnow's
servers refuse the requests of foreign web pages (see `flows.serve.app`), and a server that other
machines can reach requires a password.

If no server responds at PREFECT_API_URL, a flow starts one for its own run. A server that Prefect
started would be in the flow's process group: Ctrl-C would stop it before the flow could record its
interruption, and a killed flow would leave it behind. Winnow's server has its own process group and
stops with the flow. It writes to the database under PREFECT_HOME that `winnow ui` reads."""

import argparse
import atexit
import errno
import logging
import os
import re
import secrets
import socket
import subprocess
import time
import tomllib
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import BinaryIO
from urllib.parse import urlsplit

from flows.pipeline import commands
from tasks.common.files import ArtifactError, create_file
from tasks.common.processes.ports import LOOPBACK, free_port
from tasks.common.redaction import without_secrets

logger = logging.getLogger(__name__)

START_SECONDS = 180.0
PRIVATE = 0o077  # the umask of servers: only their user may read databases and logs
HOST, PORT = "127.0.0.1", 4200  # of the pages
_settings = ExitStack()  # never closed: the settings last until the process ends
FOR_ONE_RUN = {"PREFECT_UI_ENABLED": "false", "PREFECT__SERVER_EPHEMERAL": "1"}
OPEN = (
    "Prefect's server at %s has no password and accepts requests from anyone who can reach it, "
    "including web pages; start it with `winnow ui`, or set PREFECT_SERVER_API_AUTH_STRING there "
    "and PREFECT_API_AUTH_STRING here"
)


class ServerError(RuntimeError):
    """Raised if Prefect's server does not start."""


def home() -> Path:
    """Return the folder of Prefect's database and profiles."""
    return Path(os.environ.get("PREFECT_HOME") or Path.home() / ".prefect")


def named_url() -> str | None:
    """Return PREFECT_API_URL of the environment or profile, or None, without importing Prefect."""
    if url := os.environ.get("PREFECT_API_URL"):
        return url
    path = Path(os.environ.get("PREFECT_PROFILES_PATH") or home() / "profiles.toml")
    try:
        settings = tomllib.loads(path.read_text())
        active = os.environ.get("PREFECT_PROFILE") or settings["active"]
        return str(settings["profiles"][active]["PREFECT_API_URL"])
    except (OSError, KeyError, TypeError, tomllib.TOMLDecodeError):
        return None


def arguments(host: str, port: int, log_level: str, app: str = "prefect") -> tuple[str, ...]:
    """Return the `python -m` arguments for one of Winnow's servers: `uvicorn` and its options."""
    listen = ("--host", host, "--port", str(port), "--log-level", log_level)
    return ("uvicorn", "--factory", f"flows.serve.app:{app}", *listen)


def settings(host: str, auth: str | None) -> dict[str, str]:
    """Return the Prefect settings of one of Winnow's servers, as environment variables: CSRF
    protection, no allowed CORS origins and, if given, the password `auth` (USER:PASSWORD)."""
    return {
        "PREFECT_SERVER_API_HOST": host,
        "PREFECT_SERVER_API_CORS_ALLOWED_ORIGINS": "",
        "PREFECT_SERVER_API_CSRF_PROTECTION_ENABLED": "true",
        "PREFECT_SERVER_DATABASE_TIMEOUT": "60",  # of a write: a checkpoint may keep the disk busy
        "PREFECT_SERVER_UI_API_URL": "/api",  # relative to the page's own origin
        "PREFECT__SERVER_FINAL": "1",
        **({"PREFECT_SERVER_API_AUTH_STRING": auth} if auth else {}),
    }


def new_auth() -> str:
    return f"winnow:{secrets.token_urlsafe(24)}"


def auth_file() -> Path:
    return home() / "winnow-auth"


def kept_auth() -> str:
    """Return USER:PASSWORD from `auth_file`, which is created if missing. Raise ArtifactError if
    others can read the file, or its content is not valid."""
    path = auth_file()

    def write(file: BinaryIO) -> None:
        os.fchmod(file.fileno(), 0o600)
        file.write(new_auth().encode())

    if not path.exists():
        create_file(path, write)
    if path.stat().st_mode & PRIVATE:
        raise ArtifactError(f"others can read the password in {path}: chmod 600 {path}")
    auth = path.read_text(errors="replace").strip()  # without one, no password is required
    if not re.fullmatch(r"[ -~]+:[ -~]+", auth):
        raise ArtifactError(f"{path} is not one line USER:PASSWORD in ASCII: delete it to renew it")
    return auth


def status(url: str, path: str, name: str | None = None) -> int | None:
    """Return the HTTP status of the response to GET `url`/`path`, or None if there is no response.
    `name` replaces the server's name in the Host header."""
    import httpx  # only here and in `comes_up`: most runs need no server

    headers, place = {"Host": name} if name else {}, f"{url.rstrip('/')}/{path}"
    try:
        return httpx.get(place, headers=headers, timeout=5.0, follow_redirects=True).status_code
    except (httpx.HTTPError, httpx.InvalidURL):
        return None


def answers(url: str) -> bool:
    """Return whether a server responds at this address, even with an error status."""
    return status(url, "health") is not None


def warn_if_open(url: str) -> None:
    """Warn about a server that has no password if others can reach it, or if it is on loopback but
    accepts a foreign host name, which lets web pages reach it (DNS rebinding)."""
    foreign = "winnow.invalid" if urlsplit(url).hostname in LOOPBACK else None
    if status(url, "admin/version", foreign) == 200:
        logger.warning(OPEN, without_secrets(url))


def add_port(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--prefect-port", type=int, default=PORT, help="default: %(default)s")


def check_port(name: str, host: str, port: int, flag: str | None = None) -> None:
    """Raise ArtifactError if binding the port fails, since a server there would look like ours."""
    page = f"http://{host}:{port}"
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except (OSError, OverflowError) as error:
            if getattr(error, "errno", None) != errno.EADDRINUSE:
                why = getattr(error, "strerror", error)
                raise ArtifactError(f"cannot listen at {page}: {why}") from error
            raise ArtifactError(
                f"port {port} is in use: {name} may already be up ({page}); or use another with "
                f"{flag or f'--{name.lower()}-port'}"
            ) from error


def provide(port: int | None = None) -> None:
    """Provide a server for the rest of this process: the server at PREFECT_API_URL or, if that is
    unset or does not respond, a new one. With a `port`, the new server listens there, has
    Prefect's web UI and requires no password. Raise ServerError if it does not start.

    The new server stops when this process exits, after Prefect's own threads have sent their
    pending data."""
    from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings

    if named := PREFECT_API_URL.value():
        if answers(named):
            warn_if_open(named)
            return
        logger.warning("%s", away(named))
    if port is not None:
        check_port("Prefect", HOST, port)
    auth, only = (new_auth(), FOR_ONE_RUN) if port is None else (None, {})
    port = port or free_port()
    child = subprocess.Popen(
        commands.launcher(*arguments(HOST, port, "critical")),
        cwd=commands.ROOT,
        env={**commands.environment(), **settings(HOST, auth), **only},
        stdin=subprocess.DEVNULL,
        process_group=0,
        umask=PRIVATE,
    )
    atexit.register(commands.end_groups, [child])
    url = f"http://{HOST}:{port}/api"
    if not comes_up(child, f"{url}/health"):
        raise ServerError(
            f"Prefect's server did not start (exit status {child.poll()}): check that {home()} "
            "is writable and its disk not full, and the output of `prefect server start`"
        )
    _settings.enter_context(
        temporary_settings({PREFECT_API_URL: url, PREFECT_API_AUTH_STRING: auth})
    )


def lost(error: Exception) -> str:
    from prefect.settings import PREFECT_API_URL

    why = str(error).partition("\n")[0] or type(error).__name__
    more = "; PREFECT_API_AUTH_STRING is its password" if "401 Unauthorized" in why else ""
    return (
        f"Prefect's server at {without_secrets(PREFECT_API_URL.value() or '')} has failed this run "
        f"({without_secrets(why)}{more}): finished results are kept; run the same command again "
        "to resume"
    )


def away(url: str) -> str:
    return (
        f"Prefect's server at {without_secrets(url)} does not respond (PREFECT_API_URL): "
        f"starting another one here, which records runs only in {home()}/prefect.db"
    )


def comes_up(child: "subprocess.Popen[bytes]", url: str) -> bool:
    """Wait for a response at `url`. Return False if `child` exits first, or after START_SECONDS."""
    import httpx

    deadline = time.monotonic() + START_SECONDS
    with httpx.Client(timeout=5.0, trust_env=False) as client:
        while time.monotonic() < deadline and child.poll() is None:
            with suppress(httpx.HTTPError):
                if client.get(url).is_success:
                    return True
            time.sleep(0.05)
    return False
