"""Prefect servers: the one that PREFECT_API_URL names, and how one of our own is started.

Everyone who can write to a Prefect server can run code wherever it schedules runs. So ours refuse
the requests of foreign pages (see `flows.app`), and one that others can reach requires a password.

A flow starts one for the time of its run where no lasting one is named. Prefect would start it in
the flow's process group: Ctrl-C would then end the server before the flow could record that it was
interrupted, and a killed flow would leave it behind. This one stands in a group of its own and ends
with the flow. It writes to the same database under PREFECT_HOME that `winnow ui` reads."""

import atexit
import logging
import os
import secrets
import socket
import subprocess
import time
import tomllib
import urllib.error
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from typing import BinaryIO
from urllib.parse import urlsplit

from flows import commands
from tasks.common.files import ArtifactError, create_file
from tasks.common.redaction import without_secrets

logger = logging.getLogger(__name__)

START_SECONDS = 180.0
PRIVATE = 0o077  # the umask of servers: their databases and logs are their user's alone
HOST = "127.0.0.1"
LOOPBACK = (HOST, "localhost", "::1")
_settings = ExitStack()  # never closed: the settings stand until the process ends
FOR_ONE_RUN = {"PREFECT_UI_ENABLED": "false", "PREFECT__SERVER_EPHEMERAL": "1"}
OPEN = (
    "Prefect's server at %s has no password, and takes requests from anybody who reaches it, web "
    "pages included; start it with `winnow ui`, or set PREFECT_SERVER_API_AUTH_STRING there and "
    "PREFECT_API_AUTH_STRING here"
)


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


def arguments(host: str, port: int, log_level: str) -> tuple[str, ...]:
    """The module and the arguments of a server of ours."""
    listen = ("--host", host, "--port", str(port), "--log-level", log_level)
    return ("uvicorn", "--factory", "flows.app:create", *listen)


def settings(host: str, auth: str | None) -> dict[str, str]:
    """Prefect's settings of such a server, as environment variables: no other origins than its own,
    tokens against forged requests, and `auth`, a user and a password, where there is one."""
    return {
        "PREFECT_SERVER_API_HOST": host,
        "PREFECT_SERVER_API_CORS_ALLOWED_ORIGINS": "",
        "PREFECT_SERVER_API_CSRF_PROTECTION_ENABLED": "true",
        "PREFECT_SERVER_UI_API_URL": "/api",  # of the page's own origin, whatever its name
        "PREFECT__SERVER_FINAL": "1",
        **({"PREFECT_SERVER_API_AUTH_STRING": auth} if auth else {}),
    }


def new_auth() -> str:
    return f"winnow:{secrets.token_urlsafe(24)}"


def auth_file() -> Path:
    return home() / "winnow-auth"


def kept_auth() -> str:
    """User and password from `auth_file`, which is made where it is missing, for its user alone."""
    path = auth_file()

    def write(file: BinaryIO) -> None:
        os.fchmod(file.fileno(), 0o600)
        file.write(new_auth().encode())

    if not path.exists():
        create_file(path, write)
    if path.stat().st_mode & PRIVATE:
        raise ArtifactError(f"others can read the password in {path}: chmod 600 {path}")
    return path.read_text().strip()


def status(url: str, path: str, name: str | None = None) -> int | None:
    """The status with which a server answers, None where none does. The request may give another
    `name` for the server than its own."""
    headers = {"Host": name} if name else {}
    try:
        request = urllib.request.Request(f"{url.rstrip('/')}/{path}", headers=headers)
        # the user's own PREFECT_API_URL: nothing of what answers is read
        with urllib.request.urlopen(request, timeout=5.0) as answer:  # nosec B310
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except (OSError, ValueError):
        return None


def answers(url: str) -> bool:
    """Whether anything answers at this address, be it with an error."""
    return status(url, "health") is not None


def warn_if_open(url: str) -> None:
    """Warn about a server without a password that others can reach, or that answers to another name
    than its own: on loopback a web page reaches that."""
    foreign = "winnow.invalid" if urlsplit(url).hostname in LOOPBACK else None
    if status(url, "admin/version", foreign) == 200:
        logger.warning(OPEN, without_secrets(url))


def provide() -> None:
    """Have a server for the rest of this process: the one that PREFECT_API_URL names, else, or
    where that one does not answer, one of our own.

    Ours ends when the process does, after Prefect's own threads have sent what they still hold.
    """
    from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL, temporary_settings

    if named := PREFECT_API_URL.value():
        if answers(named):
            warn_if_open(named)
            return
        logger.warning("%s", away(named))
    port, auth = free_port(), new_auth()
    child = subprocess.Popen(
        commands.launcher(*arguments(HOST, port, "critical")),
        cwd=commands.ROOT,
        env={**commands.environment(), **settings(HOST, auth), **FOR_ONE_RUN},
        stdin=subprocess.DEVNULL,
        process_group=0,
        umask=PRIVATE,
    )
    atexit.register(commands.end_group, child)
    url = f"http://{HOST}:{port}/api"
    if not comes_up(child, f"{url}/health"):
        raise ServerError(
            f"Prefect's server did not start (exit status {child.poll()}): see that {home()} has "
            "room and can be written, and what `prefect server start` says"
        )
    _settings.enter_context(
        temporary_settings({PREFECT_API_URL: url, PREFECT_API_AUTH_STRING: auth})
    )


def lost(error: Exception) -> str:
    """What a run ends with whose server fails it, in one sentence."""
    from prefect.settings import PREFECT_API_URL

    why = str(error).partition("\n")[0] or type(error).__name__
    more = "; PREFECT_API_AUTH_STRING is its password" if "401 Unauthorized" in why else ""
    return (
        f"Prefect's server at {without_secrets(PREFECT_API_URL.value() or '')} has failed this run "
        f"({without_secrets(why)}{more}): what the stages made is kept, and the same command goes "
        "on from there"
    )


def away(url: str) -> str:
    return (
        f"Prefect's server at {without_secrets(url)} does not answer (PREFECT_API_URL): this run "
        f"goes on, and is recorded in {home()}/prefect.db alone"
    )


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return int(probe.getsockname()[1])


def comes_up(child: "subprocess.Popen[bytes]", url: str) -> bool:
    """Wait until the server answers. False when it ends before, or stays silent."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline and child.poll() is None:
        try:
            opener.open(url, timeout=5).close()
            return True
        except (urllib.error.URLError, OSError):
            time.sleep(0.05)
    return False
