"""The processes of a pool: JSON lines in, JSON lines out. The pool (tasks/common/pool.py) kills one
when a reply takes too long.

The handshake: the first line holds the configuration with the limit of memory, and the reply says
that the loader is ready, or why it cannot be. Then this process only forks, for every worker that
the pool asks for, and sends beats in between (see tasks/common/loader.py). A worker's lines are
lists of requests. Replies are sent as soon as a moment has passed, because the pool measures the
time between lines."""

import gc
import json
import logging
import os
import resource
import select
import signal
import socket
import sys
import time
from collections.abc import Callable
from typing import Any

from tasks.common.clock import BEAT_SECONDS
from tasks.common.parent import die_with_parent

BEAT = "beat"  # a line of the loader's that answers nothing
HOLD_SECONDS = 0.002  # replies are collected for so long and sent together
MAX_FILE_BYTES = 64 << 20  # of any file that a worker writes

Answer = Callable[[Any], Any]


class Unusable(Exception):
    """The loader cannot get ready; the message says why."""


def limit(memory: int) -> None:
    """Limit this process to `memory` bytes, small files and no core dumps. Integers in text may
    have any number of digits."""
    at_most(resource.RLIMIT_AS, memory)
    at_most(resource.RLIMIT_CORE, 0)
    at_most(resource.RLIMIT_FSIZE, MAX_FILE_BYTES)
    sys.set_int_max_str_digits(0)  # the time limit replaces this one


def at_most(kind: int, value: int) -> None:
    """Lower a limit of this process, unless it is lower already (`ulimit`)."""
    soft = resource.getrlimit(kind)[0]
    value = value if soft == resource.RLIM_INFINITY else min(value, soft)
    resource.setrlimit(kind, (value, value))


def memory_gb() -> float:
    """Return the limit of this process's memory, in units of 2^30 bytes; below 0 without one."""
    return resource.getrlimit(resource.RLIMIT_AS)[0] / 2**30


def take_stdout() -> int:
    """Return a descriptor for replies. What libraries print is discarded, because the parent would
    take it for a reply."""
    replies = os.dup(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    logging.disable()
    return replies


def send(replies: int, value: Any) -> None:
    """Write one JSON line, however often the pipe takes only a part."""
    data = json.dumps(value).encode() + b"\n"
    while data:
        data = data[os.write(replies, data) :]


def answer_line(answer: Answer, requests: list[Any], replies: int) -> None:
    """Answer a list of requests, and send the replies in one line or more."""
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
    """Answer what stdin asks, in a process of its own."""
    die_with_parent()
    os.setpgid(0, 0)
    replies = take_stdout()
    limit(memory)
    with os.fdopen(0, "rb") as lines:
        for line in lines:
            answer_line(answer, json.loads(line), replies)


def fork(answer: Answer, memory: int, pipes: list[int], pool: int) -> int:
    """Return the pid of a new process that serves these pipes, without the loader's own to the
    pool."""
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        os.dup2(pipes[0], 0)
        os.dup2(pipes[1], 1)
        for descriptor in (*pipes, pool):
            os.close(descriptor)
        serve(answer, memory)
        status = 0
    finally:
        os._exit(status)  # nothing of the loader's is cleaned up here


def run(prepare: Callable[[Any], tuple[dict[str, Any], Answer]]) -> None:
    """Be the loader, on the socket that the command line names: `prepare` the configuration, whose
    `memory` is the limit in bytes, to the handshake's reply and what answers a request. It raises
    Unusable when it cannot."""
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
        gc.freeze()  # what is loaded is shared by the forks, and stays
        while True:
            if select.select([pool], [], [], BEAT_SECONDS)[0]:
                if not fork_or_wait(pool, answer, configuration["memory"]):
                    return
            else:
                send(pool.fileno(), BEAT)


def fork_or_wait(pool: socket.socket, answer: Answer, memory: int) -> bool:
    """Do what the pool asks for: start a process, which comes with its two pipes, or wait for one.
    Return whether the pool is still there."""
    message, pipes, _, _ = socket.recv_fds(pool, 4096, 2)
    if not message:
        return False
    request = json.loads(message)
    if request == "fork":
        send(pool.fileno(), fork(answer, memory, list(pipes), pool.fileno()))
        for pipe in pipes:
            os.close(pipe)
    else:
        send(pool.fileno(), os.waitpid(request, 0)[1])
    return True
