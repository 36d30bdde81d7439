"""Read messages from standard input and write them with the named clients, until the input ends.

Messages that are left when the input ends, because the stage has exited, are still written, for up
to `LAST_SECONDS`. A client that fails is skipped from then on, and the others continue."""

import importlib
import json
import os
import queue
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

from tasks.common.tracking.trackers import MirrorRun

LAST_SECONDS = 120.0  # the longest wait for a server that does not answer
NICENESS = 10


def main(names: list[str]) -> int:
    """Write all messages. Return 0, or 1 if a client failed; its error is in the log."""
    os.nice(NICENESS)
    messages: queue.Queue[dict[str, Any] | None] = queue.Queue()
    threading.Thread(target=read, args=(messages,), daemon=True).start()
    clients: dict[str, Any] = dict.fromkeys(names)  # None while no run is open
    while (message := messages.get()) is not None:
        for name in list(clients):
            try:
                clients[name] = pass_message(name, clients[name], message)
            except Exception:
                traceback.print_exc()
                del clients[name]
    return int(len(clients) < len(names))


def pass_message(name: str, client: Any, message: dict[str, Any]) -> Any:
    """Pass one message to a client. Return the client of the run that is then open, or None."""
    what, fields = message["do"], {key: value for key, value in message.items() if key != "do"}
    if what == "open":
        if client:
            client.close(True)
        module = importlib.import_module(f"tasks.common.tracking.trackers.{name}")
        return module.Client(MirrorRun(**{**fields, "folder": Path(fields["folder"])}))
    if client:
        getattr(client, what)(**fields)
    return None if what == "close" else client


def read(messages: "queue.Queue[dict[str, Any] | None]") -> None:
    """Queue every line of standard input as it arrives: the stage must not wait for a client."""
    for line in sys.stdin:
        if line.endswith("\n"):  # else cut off by a kill of the stage
            messages.put(json.loads(line))
    messages.put({"do": "close", "finished": False})  # still open after a kill of the stage
    messages.put(None)
    threading.Timer(LAST_SECONDS, os._exit, (1,)).start()


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # ends the timer and the threads of the clients
