"""Processes that answer JSON lines and can be killed: one that hangs or dies is replaced and only
its request marked.

A line out is a list of requests, a line back a list of replies, in order; a worker may answer a
list in several. Lists are as long as replies come quickly: quick requests do not wait for the pipe,
slow ones are shared out evenly. Whatever shared a list with a request that hangs or kills its
worker is asked again, alone; what fails alone is marked. So neither lists, nor order, nor the
number of processes can be seen in the replies, which come in the order of requests."""

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any

from tasks.common.files import ArtifactError

MAX_CHUNK = 64  # requests in a list
CHUNK_SECONDS = 0.005  # of work in a list: hides the latency of a pipe, and still shares out evenly
FIRST_PACE = 1e-4  # seconds a request takes one process, until there is something to go by
START_SECONDS = (
    120.0  # a process may take to get ready: it imports its libraries on a machine that may be busy
)
WORTH_STARTING = 1.0  # seconds of work left, above which another process is started


class TimedOut(Exception):
    """The request took longer than the limit, and its process was killed."""


class Died(Exception):
    """The process ended by itself while it had the request."""


class PoolError(ArtifactError):
    """A process could not get ready; the message is its own."""


class Process:
    """One worker: what it was sent and has not answered, oldest first, and when it must answer
    next."""

    def __init__(self, command: Sequence[str], hello: bytes) -> None:
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        self.popen = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            bufsize=0,
            env=environment,
            process_group=0,
        )
        assert self.popen.stdin is not None
        assert self.popen.stdout is not None
        self.stdin, self.stdout = self.popen.stdin.fileno(), self.popen.stdout.fileno()
        os.set_blocking(self.stdin, False)
        self.pending: deque[int] = deque()
        self.outgoing, self.incoming = hello, b""
        self.ready = False
        self.deadline = time.monotonic() + START_SECONDS

    @property
    def idle(self) -> bool:
        return self.ready and not self.pending

    def write(self) -> None:
        """Send as much as the pipe takes now."""
        with contextlib.suppress(
            BlockingIOError, BrokenPipeError
        ):  # a broken pipe shows as the end of its replies
            self.outgoing = self.outgoing[os.write(self.stdin, self.outgoing) :]

    def read(self) -> list[bytes] | None:
        """The lines that have come, or None when the process has ended."""
        piece = os.read(self.stdout, 1 << 16)
        *lines, self.incoming = (self.incoming + piece).split(b"\n")
        return lines if piece or lines else None

    def kill(self) -> None:
        """End it and whatever it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        for pipe in (self.popen.stdin, self.popen.stdout):
            if pipe is not None:
                pipe.close()
        self.popen.wait()

    def ending(self) -> str:
        """How it ended, in words; it has closed its replies, so it is about to."""
        try:
            code = self.popen.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            return "it closed its replies"
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"status {code}"


class Work:
    """The requests of one call: which wait, which must be asked alone, and the replies so far."""

    def __init__(self, requests: Sequence[Any]) -> None:
        self.requests = requests
        self.queue = deque(range(len(requests)))
        self.alone: set[int] = set()
        self.replies: list[Any] = [None] * len(requests)
        self.num_left = len(requests)

    def take(self, size: int) -> list[int]:
        """The next `size` that may share a list, or one that may not."""
        taken = [self.queue.popleft()]
        while self.queue and len(taken) < size and not {taken[0], self.queue[0]} & self.alone:
            taken.append(self.queue.popleft())
        return taken

    def put_back(self, indices: Collection[int]) -> None:
        """To be asked again, one by one."""
        self.alone |= set(indices)
        self.queue.extendleft(reversed(list(indices)))

    def settle(self, index: int, reply: Any) -> None:
        self.replies[index] = reply
        self.num_left -= 1


class Pool:
    """Up to `num_processes` workers of one kind. Each reads `hello` first and answers when it is
    ready."""

    def __init__(
        self, command: Sequence[str], hello: Any, num_processes: int, seconds: float
    ) -> None:
        self.command, self.hello = command, line_of(hello)
        self.num_processes, self.seconds = num_processes, seconds
        self.processes: list[Process] = []
        self.selector = selectors.DefaultSelector()
        self.pace = FIRST_PACE
        self.greeting: Any = None

    def greet(self) -> Any:
        """What a process says when it is ready; PoolError with what went wrong instead."""
        if self.greeting is None:
            self.map([])
        return self.greeting

    def map(
        self, requests: Sequence[Any], on_done: Callable[[int], object] | None = None
    ) -> list[Any]:
        """The reply to every request, in order: what the worker said, or an instance of TimedOut or
        Died."""
        try:
            return self.run(requests, on_done or (lambda _: None))
        except BaseException:
            self.close()  # else a later call would take the replies to this one for its own
            raise

    def run(self, requests: Sequence[Any], on_done: Callable[[int], object]) -> list[Any]:
        for process in [p for p in self.processes if p.popen.poll() is not None]:
            self.drop(process)  # it ended while it had nothing to do: no request's fault
        work = Work(requests)
        while work.num_left or self.greeting is None:
            self.staff(len(work.queue))
            for process in self.processes:
                if process.idle and work.queue:
                    self.give(process, work)
            before = work.num_left
            self.turn(work)
            if work.num_left < before:
                on_done(before - work.num_left)
        return work.replies

    def staff(self, num_queued: int) -> None:
        """Start a process when there is none, and more where there is work for them."""
        wanted = min(self.num_processes, 1 + int(num_queued * self.pace / WORTH_STARTING))
        while len(self.processes) < wanted:
            process = Process(self.command, self.hello)
            self.processes.append(process)
            self.selector.register(process.stdout, selectors.EVENT_READ, process)
            self.watch(process)

    def give(self, process: Process, work: "Work") -> None:
        """Send the next list of requests."""
        shared = -(-len(work.queue) // len(self.processes))
        size = (
            min(MAX_CHUNK, int(CHUNK_SECONDS / self.pace), shared)
            if self.pace * shared > CHUNK_SECONDS
            else MAX_CHUNK
        )
        process.pending.extend(work.take(max(1, size)))
        process.outgoing = line_of([work.requests[i] for i in process.pending])
        process.deadline = time.monotonic() + self.seconds
        self.watch(process)

    def watch(self, process: Process) -> None:
        """Write what goes at once; the rest when the pipe has room."""
        process.write()
        watched = process.stdin in self.selector.get_map()
        if process.outgoing and not watched:
            self.selector.register(process.stdin, selectors.EVENT_WRITE, process)
        elif not process.outgoing and watched:
            self.selector.unregister(process.stdin)

    def turn(self, work: "Work") -> None:
        """Wait for something to happen, and deal with it."""
        wait = (
            min(process.deadline for process in self.processes if not process.idle)
            - time.monotonic()
        )
        for key, event in self.selector.select(max(wait, 0.0)):
            process: Process = key.data
            if process not in self.processes:
                continue
            if event & selectors.EVENT_WRITE:
                self.watch(process)
            else:
                self.receive(process, work)
        now = time.monotonic()
        for process in [p for p in self.processes if not p.idle and p.deadline < now]:
            self.lose(process, work, TimedOut(f"no answer in {self.seconds:g} s"))

    def receive(self, process: Process, work: "Work") -> None:
        """Take in what a process has said."""
        lines = process.read()
        if lines is None:
            self.lose(process, work, Died(process.ending()))
            return
        if lines and not process.ready:
            self.welcome(process, json.loads(lines.pop(0)))
        replies = [reply for line in lines for reply in json.loads(line)]
        now = time.monotonic()
        if replies:
            spent = now - (process.deadline - self.seconds)
            self.pace = 0.5 * self.pace + 0.5 * spent / len(replies)
        for reply in replies:
            work.settle(process.pending.popleft(), reply)
        process.deadline = now + self.seconds

    def welcome(self, process: Process, greeting: Any) -> None:
        """A process is ready, or says why it cannot be."""
        if "failure" in greeting:
            raise PoolError(f"the verifiers cannot be used: {greeting['failure']}")
        process.ready, self.greeting = True, greeting

    def lose(self, process: Process, work: "Work", reason: Exception) -> None:
        """A process hangs or has ended: mark the request it had, or ask again one by one where it
        had several."""
        self.drop(process)
        if not process.ready:
            raise PoolError(f"a worker process did not get ready: {reason}")
        if len(process.pending) == 1:
            work.settle(process.pending[0], reason)
        else:
            work.put_back(process.pending)

    def drop(self, process: Process) -> None:
        self.processes.remove(process)
        for descriptor in (process.stdout, process.stdin):
            if descriptor in self.selector.get_map():
                self.selector.unregister(descriptor)
        process.kill()

    def close(self) -> None:
        """End all processes. The pool can be used again: it starts others."""
        for process in list(self.processes):
            self.drop(process)


def line_of(value: Any) -> bytes:
    return json.dumps(value).encode() + b"\n"


def python(module: str) -> list[str]:
    """The command that runs `module` with this Python."""
    return [sys.executable, "-m", module]
