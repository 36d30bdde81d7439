"""dvc as a subprocess: what it says (graph, status), and what it does (bring one stage up to date).

dvc runs in its own process group, so that Ctrl-C reaches the flow alone and the flow ends the whole
group: first with an interrupt, which dvc itself waits out while the stage saves what it has and
leaves; then, after the grace time, by killing. (SIGTERM would end dvc at once, and the stage with
it, before it could save.) A flow that is killed itself takes dvc along, and dvc the stage: each
asked the kernel for that."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
GRACE_SECONDS = 20.0
POLL_SECONDS = 0.05
EDGE = re.compile(r'^"(?P<node>[^"]+)"(?: -> "(?P<dependent>[^"]+)")?;?$', re.MULTILINE)


class CommandError(RuntimeError):
    """dvc could not answer; its own words are in the message."""


def environment() -> dict[str, str]:
    """This environment, with the `python` of the stages' commands being the one that runs the
    flow."""
    folder = os.path.dirname(sys.executable)
    return {**os.environ, "PATH": os.pathsep.join([folder, os.environ.get("PATH", os.defpath)])}


def ask(*arguments: str) -> str:
    """The standard output of a dvc command that only looks."""
    command = [sys.executable, "-m", "dvc", *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True)
    if done.returncode:
        raise CommandError(
            f"dvc {' '.join(arguments)} failed:\n{done.stderr.strip() or done.stdout.strip()}"
        )
    return done.stdout


def graph() -> dict[str, set[str]]:
    """Every stage with the stages it needs, in the order in which dvc names them."""
    return parse_graph(ask("dag", "--dot"))


def parse_graph(dot: str) -> dict[str, set[str]]:
    """The nodes and edges of Graphviz text as stage -> stages it needs."""
    needs: dict[str, set[str]] = {}
    for match in EDGE.finditer(dot):
        needs.setdefault(match["node"], set())
        if match["dependent"]:
            needs.setdefault(match["dependent"], set()).add(match["node"])
    return needs


def status(*stages: str) -> dict[str, list[Any]]:
    """What has changed, by stage, as dvc words it; a stage that is up to date is not in it."""
    changed: dict[str, list[Any]] = json.loads(ask("status", "--json", *stages))
    return changed


def launcher(*arguments: str, pipe: int = -1) -> list[str]:
    """The command line of a Python module that is to end with this process (see `flows.launch`)."""
    return [sys.executable, "-m", "flows.launch", str(os.getpid()), str(pipe), *arguments]


def repro(stage: str, force: bool = False) -> tuple[int, bool]:
    """Bring one stage up to date, looking at nothing upstream: (exit status, whether its command
    was started)."""
    options = ["--single-item", *(["--force"] if force else [])]
    read, write = os.pipe()
    with os.fdopen(read, "rb") as pipe:
        try:
            code = run_group(
                launcher("dvc", "repro", *options, stage, pipe=write), pass_fds=(write,)
            )
        finally:
            os.close(write)
        return code, bool(pipe.read())


def run_group(command: list[str], pass_fds: tuple[int, ...] = ()) -> int:
    """Run `command` in its own process group, on this terminal; whatever interrupts the wait ends
    the whole group.

    The wait looks up a few times a second: a library's signal handler may keep a blocked one from
    being interrupted."""
    child = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment(),
        stdin=subprocess.DEVNULL,
        pass_fds=pass_fds,
        process_group=0,
    )
    try:
        while child.poll() is None:
            time.sleep(POLL_SECONDS)
        return int(child.returncode)
    except BaseException:
        end_group(child)
        raise


def end_group(child: "subprocess.Popen[Any]", grace: float = GRACE_SECONDS) -> None:
    """Interrupt the group of `child`, wait for it up to `grace` seconds, and kill what is left of
    it."""
    try:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGINT)
        child.wait(grace)
    except subprocess.TimeoutExpired:
        print(
            f"still running {grace:.0f} s after the interrupt: killing it",
            file=sys.stderr,
            flush=True,
        )
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        child.wait()
