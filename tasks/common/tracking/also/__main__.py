"""Read messages from standard input and write them with one client, until there are no more.

The stage that sends them may be gone by then: what it sent is still written, for as long as
`LAST_SECONDS`."""

import importlib
import json
import os
import queue
import sys
import threading
from pathlib import Path
from typing import Any

from tasks.common.tracking.also import MirrorRun

LAST_SECONDS = 120.0  # a server that does not answer keeps this process no longer
NICENESS = 10


def main(name: str) -> int:
    """0, or 1 where the client failed: what it says is in the log."""
    os.nice(NICENESS)
    messages: queue.Queue[dict[str, Any] | None] = queue.Queue()
    threading.Thread(target=read, args=(messages,), daemon=True).start()
    module = importlib.import_module(f"tasks.common.tracking.also.{name}")
    client, is_whole = None, False
    while (message := messages.get()) is not None:
        what = message.pop("do")
        if what == "open":
            if client:
                client.close(True)
            folder = Path(message.pop("folder"))
            client, is_whole = module.Client(MirrorRun(**message, folder=folder)), False
        elif what == "close" and client:
            client.close(message["finished"])
            client, is_whole = None, True
        elif client:
            getattr(client, what)(**message)
    if client and not is_whole:  # the stage was killed
        client.close(False)
    return 0


def read(messages: "queue.Queue[dict[str, Any] | None]") -> None:
    """Take every line at once, so that the stage never waits for the client."""
    for line in sys.stdin:
        messages.put(json.loads(line))
    messages.put(None)
    threading.Timer(LAST_SECONDS, os._exit, (1,)).start()


if __name__ == "__main__":
    status = main(sys.argv[1])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # the timer, and whatever threads a client has
