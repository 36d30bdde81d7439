"""Stages forked from one process: signals and exit statuses pass between command and fork."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tasks.common.processes import forks
from tests.patience import PATIENCE, wait_for

STAGE = """
import os, signal, sys, time
from pathlib import Path
from tasks.common.processes import ending

ending.begin_stage()

def write(text):
    Path(os.environ["OUTPUT"]).write_text(text)

print(os.getcwd(), *sys.argv[1:], os.environ.get("WINNOW_FORKS"), flush=True)
if sys.argv[1] == "wait":
    ending.interrupt_on_terminate()
    try:
        write(str(os.getpid()))
        time.sleep(60)
    except KeyboardInterrupt:
        write("saved")
        sys.exit(130)
if sys.argv[1] == "die":
    os.kill(os.getpid(), signal.SIGKILL)
sys.exit(int(sys.argv[1]))
"""
COMMAND = """
import os, sys
from tasks.common.processes import forks, ending
ending.begin_stage()
status = forks.run_forked("a_stage")
print("here", flush=True)
sys.exit(99 if status is None else status)
"""
SERVER = """
import sys
from tasks.common.processes import forks, ending
ending.die_with_parent()
forks.serve_stages(sys.argv[1], ("json", *sys.argv[2:]))
"""

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="forks are for Linux")


def handles_terminate(pid: int) -> bool:
    """Return whether a command has its handlers. Its fork may begin earlier."""
    status = Path(f"/proc/{pid}/status").read_text()
    (caught,) = [line.split()[1] for line in status.splitlines() if line.startswith("SigCgt:")]
    return bool(int(caught, 16) >> (signal.SIGTERM - 1) & 1)


class World:
    """A server, and a stage that can be forked from it."""

    def __init__(self, root: Path, *libraries: str) -> None:
        self.address, self.output = str(root / "forks"), root / "output"
        (root / "a_stage.py").write_text(STAGE)
        paths = os.pathsep.join((str(root), os.getcwd()))
        self.environment = {**os.environ, "PYTHONPATH": paths, "OUTPUT": str(self.output)}
        line = [sys.executable, "-c", SERVER, self.address, *libraries]
        self.server = subprocess.Popen(line, env=self.environment, process_group=0)
        wait_for((root / "forks").exists)

    def start(self, *arguments: str) -> "subprocess.Popen[str]":
        environment = {**self.environment, forks.ADDRESS: self.address}
        line = [sys.executable, "-c", COMMAND, *arguments]
        return subprocess.Popen(
            line,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            process_group=self.server.pid if self.server.poll() is None else 0,
        )

    def waiting(self) -> tuple["subprocess.Popen[str]", psutil.Process]:
        """Start a command, and return it and the stage that waits in its fork."""
        command = self.start("wait")
        wait_for(lambda: self.output.exists() and self.output.read_text().isdigit())
        wait_for(lambda: handles_terminate(command.pid))
        return command, psutil.Process(int(self.output.read_text()))


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    made = World(tmp_path)
    yield made
    made.server.kill()
    made.server.wait()


@pytest.mark.parametrize(("ending", "status"), [("0", 0), ("3", 3), ("die", 128 + signal.SIGKILL)])
def test_fork_has_the_arguments_and_returns_its_status(
    ending: str, status: int, world: World
) -> None:
    for _ in range(2):
        command = world.start(ending, "more")
        printed, _ = command.communicate()
        assert printed == f"{os.getcwd()} {ending} more None\nhere\n"
        assert command.returncode == status


def test_interrupt_reaches_the_stage_and_not_the_server(world: World) -> None:
    command, stage = world.waiting()
    os.killpg(world.server.pid, signal.SIGINT)
    assert command.wait() == 130
    assert world.output.read_text() == "saved"
    assert not stage.is_running()
    assert world.start("0").wait() == 0


def test_interrupt_during_the_imports_of_the_server_ends_the_command(tmp_path: Path) -> None:
    slow = "import os, time; open(os.environ['OUTPUT'], 'w'); time.sleep(600)"
    (tmp_path / "slow_library.py").write_text(slow)
    world = World(tmp_path, "slow_library")
    try:
        command = world.start("0")
        wait_for(world.output.exists)
        os.killpg(world.server.pid, signal.SIGINT)
        assert command.wait(PATIENCE) == 130
        assert world.server.poll() is None
    finally:
        world.server.kill()
        world.server.wait()
    assert command.communicate() == ("", None)


def test_sigterm_is_passed_on(world: World) -> None:
    command, _ = world.waiting()
    command.terminate()
    assert command.wait() == 130
    assert world.output.read_text() == "saved"


def test_stage_ends_with_a_killed_command(world: World) -> None:
    command, stage = world.waiting()
    command.kill()
    stage.wait(30)
    assert world.output.read_text() == str(stage.pid)  # it had no time to save
    assert world.start("0").wait() == 0


def test_stage_ends_with_a_killed_server(world: World) -> None:
    command, stage = world.waiting()
    world.server.kill()
    assert command.wait() == 128 + signal.SIGKILL
    stage.wait(30)


def test_command_runs_the_stage_itself_without_a_server(world: World, tmp_path: Path) -> None:
    world.server.kill()
    world.server.wait()
    assert world.start("0").wait() == 99
    (tmp_path / "forks").unlink()
    unable = World(tmp_path, "no_such_library")
    assert unable.start("0").wait() == 99
    unable.server.wait()
