"""python -P guard.py COMMAND...: run a command that must not outlive the process that starts it.

The starting process holds the other end of the guard's standard input and starts the guard in a
session of its own. When that end closes, on purpose or because the process was killed, the guard
kills its whole process group: the command and everything the command has started. It does the same
when the command ends by itself.

It is run as a file: as a module of its package it would take seconds to import torch."""

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
    """Wait for the command, then kill the group, this process included."""
    child.wait()
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1:])
