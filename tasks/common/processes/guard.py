"""python -P guard.py SECONDS COMMAND...: run a command. When the guard's owner, the process that
started the guard, exits, stop the command and all processes that the command has started.

The owner starts the guard in a separate session, with a pipe as standard input. When the owner
closes its end of the pipe or is killed, the guard sends SIGTERM to the command, waits up to
SECONDS, and kills its whole process group. If the command exits first, the group is killed at once.
If the guard itself is killed, a fork that it has created kills the group.

The guard is run as a file, because `-m` would first import its packages, which can take seconds."""

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence


def guarded(command: Sequence[str], grace: float = 0.0) -> list[str]:
    """Return the command line that runs `command` under a guard; `grace` is its SECONDS."""
    return [sys.executable, "-P", __file__, str(grace), *command]


def main(grace: float, command: list[str]) -> None:
    kill_group_afterwards()
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    threading.Thread(target=end_with, args=[child], daemon=True).start()
    sys.stdin.buffer.read()
    try:
        if grace:
            child.terminate()
            child.wait(grace)
    finally:
        os.killpg(0, signal.SIGKILL)


def kill_group_afterwards() -> None:
    """Create a fork that kills the group when this process ends. The kernel alone could kill only
    the command, not the processes that it has started."""
    reading, writing = os.pipe()  # the command inherits neither
    if os.fork() == 0:
        os.close(writing)
        os.read(reading, 1)
        os.killpg(0, signal.SIGKILL)
    os.close(reading)


def end_with(child: "subprocess.Popen[bytes]") -> None:
    """Wait until the command ends, and exit with its status; then the group is killed."""
    status = child.wait()
    os._exit(status if status >= 0 else 128 - status)


if __name__ == "__main__":
    main(float(sys.argv[1]), sys.argv[2:])
