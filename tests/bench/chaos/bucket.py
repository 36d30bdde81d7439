"""The store in a bucket of a real S3 server, over an unreliable network."""

import os
import re
import select
import shutil
import socket
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import yaml

from tasks.common.locations import open_location
from tests import s3_server
from tests.bench.chaos.events import Event
from tests.bench.chaos.faults import Done, begin, finish
from tests.bench.chaos.world import DONE, World

KINDS = ("bucket", "short body")
SHORTER = 9  # missing bytes of a short body
LENGTH = re.compile(rb"(?<=\r\ncontent-length: )\d+", re.IGNORECASE)
missing = s3_server.missing
UNAVAILABLE = b"HTTP/1.1 503 Slow Down\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"


def start(folder: Path) -> s3_server.S3Server:
    """Start the server of all workers."""
    shutil.rmtree(folder, ignore_errors=True)  # left by a killed harness
    folder.mkdir(parents=True)
    server = s3_server.S3Server(folder)
    os.environ.update(server.environment())
    return server


def disturb(world: World, event: Event) -> Done:
    """Run the event's command, with the store in a bucket and over a network that fails. For short
    bodies the bucket contains all rows before, because the stage reads them."""
    assert world.server is not None
    world.store = f"s3://chaos-{uuid.uuid4().hex[:12]}/store"
    world.variables = world.server.environment()
    files, root = open_location(world.store)
    files.mkdir(root.partition("/")[0])
    path = world.project / "params.yaml"
    values = yaml.safe_load(path.read_text())
    values["store"]["location"] = world.store
    path.write_text(yaml.safe_dump(values, sort_keys=False))
    if event.kind == "short body":
        files.put(f"{world.folder}/snapshots/{DONE}/data/store/", root, recursive=True)
    with network(world.server.port, event) as (url, counted):
        process = begin(world, event, AWS_ENDPOINT_URL=url, AWS_MAX_ATTEMPTS="3")
        done = finish(world, process)
    what = f"{counted['failed']} of {counted['requests']} requests: {event.how}"
    return {"hit": counted["failed"] > 0, "what": what, **done}


@contextmanager
def network(port: int, event: Event) -> Iterator[tuple[str, dict[str, int]]]:
    """Yield a proxy to the server at `port`. It fails a share of the requests, in the way of
    `event.how`; or the first two reads of every shard, or all."""
    rng, counted, read = event.rng, {"requests": 0, "failed": 0}, Counter[bytes]()

    def fails(request: bytes) -> bool:
        line = request.partition(b"\r\n")[0]
        read[line] += 1
        if event.kind == "bucket":
            failed = rng.random() < 0.2 + event.at / 2
        else:
            is_shard = line.startswith(b"GET ") and b".parquet" in line
            failed = is_shard and (read[line] <= 2 or event.how == "always")
        counted["requests"] += 1
        counted["failed"] += failed
        return failed

    def listen() -> None:
        with suppress(OSError):
            while True:
                pair = (listener.accept()[0], port, event.how, fails)
                threading.Thread(target=carry, args=pair, daemon=True).start()

    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=listen, daemon=True).start()
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", counted
        listener.shutdown(socket.SHUT_RDWR)


def carry(client: socket.socket, port: int, how: str, fails: Callable[[bytes], bool]) -> None:
    """Forward a connection. The client's first data, and its data after an answer, is a request."""
    with suppress(OSError), client, socket.create_connection(("127.0.0.1", port)) as server:
        is_new, failed = True, False
        while True:
            ready, _, _ = select.select([client, server], [], [])
            source = ready[0]
            data = source.recv(2**16)
            if not data:
                return
            if source is client and is_new:
                failed = fails(data)
                if failed and how == "503":
                    client.sendall(UNAVAILABLE)
                if failed and how in ("503", "refused"):
                    return
                time.sleep(1.0 if failed and how == "slow" else 0.0)
            if source is server and failed and how == "cut":
                client.sendall(data[: len(data) // 2])
                return
            if source is server and failed and how in ("twice", "always"):
                data, failed = shortened(data, server), False
            is_new = source is server
            (server if source is client else client).sendall(data)


def shortened(data: bytes, server: socket.socket) -> bytes:
    """Return the whole answer that begins with `data`, with a shortened body."""
    while not (found := LENGTH.search(data)) or b"\r\n\r\n" not in data:
        data += server.recv(2**16)
    length, head = int(found[0]), len(data.partition(b"\r\n\r\n")[0]) + 4
    while len(data) < head + length:
        data += server.recv(2**16)
    return LENGTH.sub(b"%d" % (length - SHORTER), data[:head]) + data[head:-SHORTER]
