"""The worker processes of a pool: JSON lines in, JSON lines out. The pool (see `pool`) kills a
worker if a reply takes too long.

In the handshake, the first line is the configuration with the memory limit; the reply states that
the loader is ready, or why it is not. The loader then becomes a fork server (see `forks`), and
each fork is a worker, which reads lists of requests. Before a worker starts on a further
request, it sends replies older than HOLD_SECONDS: the pool measures the time between lines."""

import json
import logging
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

from tasks.common.processes import forks
from tasks.common.processes.ending import die_with_parent

HOLD_SECONDS = 0.002  # replies are collected this long and sent together
MAX_FILE_BYTES = 64 << 20  # of any file that a worker writes

Answer = Callable[[Any], Any]


class Unusable(Exception):
    """Raised if the loader cannot become ready; the message contains the reason."""


def limit(memory: int) -> None:
    """Limit this process to `memory` bytes, small files and no core dumps. Lift Python's limit on
    the number of digits of integers in text."""
    at_most(resource.RLIMIT_AS, memory)
    at_most(resource.RLIMIT_CORE, 0)
    at_most(resource.RLIMIT_FSIZE, MAX_FILE_BYTES)
    sys.set_int_max_str_digits(0)  # the time limit replaces this limit


def at_most(kind: int, value: int) -> None:
    """Lower a limit of this process, unless it is already lower (`ulimit`)."""
    soft = resource.getrlimit(kind)[0]
    value = value if soft == resource.RLIM_INFINITY else min(value, soft)
    resource.setrlimit(kind, (value, value))


def memory_gb() -> float:
    """Return the memory limit of this process in GiB (2^30 bytes), negative without a limit."""
    return resource.getrlimit(resource.RLIMIT_AS)[0] / 2**30


def take_stdout() -> int:
    """Return a descriptor for replies. Discard output printed by libraries, because the parent
    would read it as a reply."""
    replies = os.dup(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    logging.disable()
    return replies


def send(replies: int, value: Any) -> None:
    """Write one JSON line, in several writes if the pipe is full."""
    data = json.dumps(value).encode() + b"\n"
    while data:
        data = data[os.write(replies, data) :]


def answer_line(answer: Answer, requests: list[Any], replies: int) -> None:
    """Answer a list of requests, and send the replies in one or more lines."""
    held: list[Any] = []
    since = time.monotonic()
    for request in requests:
        held.append(answer(request))
        if time.monotonic() - since > HOLD_SECONDS:
            send(replies, held)
            held = []
            since = time.monotonic()
    if held:
        send(replies, held)


def serve(answer: Answer, memory: int) -> None:
    """Answer the requests on stdin, in a separate process group."""
    die_with_parent()
    os.setpgid(0, 0)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    replies = take_stdout()
    limit(memory)
    with os.fdopen(0, "rb") as lines:
        for line in lines:
            answer_line(answer, json.loads(line), replies)


def run(prepare: Callable[[Any], tuple[dict[str, Any], Answer]]) -> None:
    """Run the loader, on the socket whose descriptor is on the command line. `prepare` turns the
    configuration, in which `memory` is the limit in bytes, into the handshake's reply and the
    function that answers a request. `prepare` raises Unusable if the loader cannot become ready."""
    die_with_parent()
    # Ctrl-C reaches the whole group, but the parent finishes its step first
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with socket.socket(fileno=int(sys.argv[1])) as pool:
        with pool.makefile("rb") as lines:
            configuration = json.loads(lines.readline())
        try:
            ready, answer = prepare(configuration)
        except Unusable as error:
            send(pool.fileno(), {"failure": str(error)})
            return
        send(pool.fileno(), ready)
        sys.stdout.flush()
        request = forks.serve(pool)
    status = 1
    try:
        request.take_streams()
        serve(answer, configuration["memory"])
        status = 0
    finally:
        os._exit(status)  # skip the loader's own clean-up
