"""A pool of processes that answer JSON lines and can be killed: one that hangs or dies is replaced,
and only the request at fault fails.

The protocol: the pool sends a configuration line and the process answers when it is ready (the
handshake). Then a line out is a list of requests, and a line back a list of replies in order; a
process may answer a list in several lines. Lists are longer the faster replies come: fast requests
do not wait for the pipe, slow ones are distributed evenly. When a process hangs or dies, each of
its pending requests is asked again alone, and one that fails alone is marked as failed. So the
replies, in the order of the requests, depend neither on the lists nor on the number of
processes."""

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

MAX_REQUESTS = 64  # requests in a list
# seconds of work in a list: hides the latency of a pipe, and still distributes work evenly
LIST_SECONDS = 0.005
FIRST_SECONDS_PER_REQUEST = 1e-4  # the estimate before the first reply
# limit of the handshake: a process imports its libraries, perhaps on a busy machine
START_SECONDS = 120.0
# another process is started for so many seconds of work in the queue
SECONDS_PER_PROCESS = 1.0


class TimedOut(Exception):
    """The request took longer than the limit, and its process was killed."""


class Died(Exception):
    """The process ended by itself while it worked on the request."""


class PoolError(ArtifactError):
    """A process did not get ready; the message gives the reason."""


class Process:
    """One worker process: its pending requests, oldest first, and the deadline of its next
    reply."""

    def __init__(self, command: Sequence[str], configuration: bytes) -> None:
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
        self.stdin = self.popen.stdin.fileno()
        self.stdout = self.popen.stdout.fileno()
        os.set_blocking(self.stdin, False)
        self.pending: deque[int] = deque()
        self.outgoing = configuration  # bytes still to be written
        self.incoming = b""  # the beginning of the next line
        self.ready = False
        self.deadline = time.monotonic() + START_SECONDS

    @property
    def idle(self) -> bool:
        """Whether the process is ready and has no pending requests."""
        return self.ready and not self.pending

    def write(self) -> None:
        """Write as much as the pipe takes now. A broken pipe shows up as the end of its replies."""
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            self.outgoing = self.outgoing[os.write(self.stdin, self.outgoing) :]

    def read(self) -> list[bytes] | None:
        """Return the complete lines that have arrived, or None when the process has ended."""
        piece = os.read(self.stdout, 1 << 16)
        *lines, self.incoming = (self.incoming + piece).split(b"\n")
        return lines if piece or lines else None

    def kill(self) -> None:
        """Kill the process and everything it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        for pipe in (self.popen.stdin, self.popen.stdout):
            if pipe is not None:
                pipe.close()
        self.popen.wait()

    def ending(self) -> str:
        """Return in words how the process ended. It has closed its replies, so it is about to
        end."""
        try:
            code = self.popen.wait(timeout=1.0)
        except subprocess.TimeoutExpired:
            return "it closed its replies"
        return f"signal {signal.Signals(-code).name}" if code < 0 else f"status {code}"


class Work:
    """The requests of one call: those in the queue, those to be asked alone, and the replies so
    far."""

    def __init__(self, requests: Sequence[Any]) -> None:
        self.requests = requests
        self.queue = deque(range(len(requests)))
        self.alone: set[int] = set()
        self.replies: list[Any] = [None] * len(requests)
        self.num_left = len(requests)

    def take(self, size: int) -> list[int]:
        """Return the next requests for one list: up to `size`, or one that must be asked alone."""
        taken = [self.queue.popleft()]
        while self.queue and len(taken) < size and not {taken[0], self.queue[0]} & self.alone:
            taken.append(self.queue.popleft())
        return taken

    def requeue(self, indices: Collection[int]) -> None:
        """Put requests back into the queue, each to be asked alone."""
        self.alone |= set(indices)
        self.queue.extendleft(reversed(list(indices)))

    def set_reply(self, index: int, reply: Any) -> None:
        """Keep the reply to a request."""
        self.replies[index] = reply
        self.num_left -= 1


class Pool:
    """Up to `num_processes` processes of one command. Each gets `configuration` first and answers
    when it is ready; a reply may take `seconds`."""

    def __init__(
        self, command: Sequence[str], configuration: Any, num_processes: int, seconds: float
    ) -> None:
        self.command = command
        self.configuration = to_line(configuration)
        self.num_processes = num_processes
        self.seconds = seconds
        self.processes: list[Process] = []
        self.selector = selectors.DefaultSelector()
        self.seconds_per_request = FIRST_SECONDS_PER_REQUEST
        self.ready_message: Any = None

    def handshake(self) -> Any:
        """Return the message of a process that is ready. Raises PoolError when it cannot get
        ready."""
        if self.ready_message is None:
            self.map([])
        return self.ready_message

    def map(
        self, requests: Sequence[Any], on_done: Callable[[int], object] | None = None
    ) -> list[Any]:
        """Return the reply to every request, in order: the process's reply, or an instance of
        TimedOut or Died."""
        try:
            return self.run(requests, on_done or (lambda _: None))
        except BaseException:
            self.close()  # otherwise a later call would receive the replies to this one
            raise

    def run(self, requests: Sequence[Any], on_done: Callable[[int], object]) -> list[Any]:
        """Assign requests and collect replies until all are there; see `map`."""
        # a process that ended while it was idle is replaced: no request is at fault
        for process in [p for p in self.processes if p.popen.poll() is not None]:
            self.drop(process)
        work = Work(requests)
        while work.num_left or self.ready_message is None:
            self.start_processes(len(work.queue))
            for process in self.processes:
                if process.idle and work.queue:
                    self.assign(process, work)
            before = work.num_left
            self.poll(work)
            if work.num_left < before:
                on_done(before - work.num_left)
        return work.replies

    def start_processes(self, num_queued: int) -> None:
        """Start a process when there is none, and more where the queue is worth it."""
        wanted = min(
            self.num_processes, 1 + int(num_queued * self.seconds_per_request / SECONDS_PER_PROCESS)
        )
        while len(self.processes) < wanted:
            process = Process(self.command, self.configuration)
            self.processes.append(process)
            self.selector.register(process.stdout, selectors.EVENT_READ, process)
            self.watch(process)

    def assign(self, process: Process, work: "Work") -> None:
        """Send the process its next list of requests."""
        size = MAX_REQUESTS
        share = -(-len(work.queue) // len(self.processes))  # of each process, rounded up
        if self.seconds_per_request * share > LIST_SECONDS:
            size = min(MAX_REQUESTS, int(LIST_SECONDS / self.seconds_per_request), share)
        process.pending.extend(work.take(max(1, size)))
        process.outgoing = to_line([work.requests[i] for i in process.pending])
        process.deadline = time.monotonic() + self.seconds
        self.watch(process)

    def watch(self, process: Process) -> None:
        """Write what the pipe takes now, and wait for room if something is left."""
        process.write()
        watched = process.stdin in self.selector.get_map()
        if process.outgoing and not watched:
            self.selector.register(process.stdin, selectors.EVENT_WRITE, process)
        elif not process.outgoing and watched:
            self.selector.unregister(process.stdin)

    def poll(self, work: "Work") -> None:
        """Wait for events, handle them, and fail the processes whose deadline has passed."""
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
            self.on_failure(process, work, TimedOut(f"no answer in {self.seconds:g} s"))

    def receive(self, process: Process, work: "Work") -> None:
        """Read a process's output: its ready message first, then replies."""
        lines = process.read()
        if lines is None:
            self.on_failure(process, work, Died(process.ending()))
            return
        if lines and not process.ready:
            self.on_ready(process, json.loads(lines.pop(0)))
        replies = [reply for line in lines for reply in json.loads(line)]
        # the estimate of seconds per request is a moving average
        now = time.monotonic()
        if replies:
            spent = now - (process.deadline - self.seconds)
            self.seconds_per_request = 0.5 * self.seconds_per_request + 0.5 * spent / len(replies)
        for reply in replies:
            work.set_reply(process.pending.popleft(), reply)
        process.deadline = now + self.seconds

    def on_ready(self, process: Process, message: Any) -> None:
        """Mark a process as ready. Raises PoolError with its reason when it cannot be."""
        if "failure" in message:
            raise PoolError(f"the verifiers cannot be used: {message['failure']}")
        process.ready = True
        self.ready_message = message

    def on_failure(self, process: Process, work: "Work", reason: Exception) -> None:
        """Drop a process that hangs or has ended. Its only pending request fails; of several, each
        is asked again alone."""
        self.drop(process)
        if not process.ready:
            raise PoolError(f"a worker process did not get ready: {reason}")
        if len(process.pending) == 1:
            work.set_reply(process.pending[0], reason)
        else:
            work.requeue(process.pending)

    def drop(self, process: Process) -> None:
        """Stop watching a process and kill it."""
        self.processes.remove(process)
        for descriptor in (process.stdout, process.stdin):
            if descriptor in self.selector.get_map():
                self.selector.unregister(descriptor)
        process.kill()

    def close(self) -> None:
        """Kill all processes. The pool can be used again and then starts new ones."""
        for process in list(self.processes):
            self.drop(process)


def to_line(value: Any) -> bytes:
    """Return a value as a line of JSON."""
    return json.dumps(value).encode() + b"\n"


def python(module: str) -> list[str]:
    """Return the command that runs `module` with this Python."""
    return [sys.executable, "-m", module]
