"""python -P guarded.py COMMAND...: a command that ends cleanly when the one that started it does.

The starting process holds the other end of the standard input and starts this in a session of its
own. When that end closes, on purpose or because the process was killed, the command is asked to
terminate; what is left of the session after the grace time is killed. The same happens to what a
command leaves behind when it ends by itself."""

import os
import signal
import subprocess
import sys
import threading

GRACE_SECONDS = 10.0


def main(command: list[str]) -> None:
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL)
    threading.Thread(target=end_with, args=[child], daemon=True).start()
    sys.stdin.buffer.read()
    child.terminate()
    try:
        child.wait(GRACE_SECONDS)
    finally:
        os.killpg(0, signal.SIGKILL)


def end_with(child: "subprocess.Popen[bytes]") -> None:
    """Wait for the command, then kill the group, this process included."""
    child.wait()
    os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1:])
