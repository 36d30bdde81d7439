"""python -m tasks.engines.server.guard COMMAND...: run a command that must not outlive whoever
started it.

Whoever starts the guard holds the other end of its standard input and starts it in a session of its
own. When that end closes, by intention or because its holder was killed, the guard kills its whole
process group: the command and all that the command has started. When the command ends by itself,
what it left behind goes the same way."""

import os
import signal
import subprocess
import sys
import threading


def main(command: list[str]) -> None:
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    threading.Thread(target=end_with, args=[child], daemon=True).start()
    sys.stdin.buffer.read()
    os.killpg(0, signal.SIGKILL)


def end_with(child: "subprocess.Popen[bytes]") -> None:
    """Wait for the command, then kill its group, this process among it."""
    child.wait()
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1:])
