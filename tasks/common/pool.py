"""A pool of processes that answer JSON lines and can be killed: one that hangs or dies is replaced,
and only the request at fault fails.

The processes run `tasks/common/worker.py`. They are forks of one, the loader, which imports what
they need and then only forks: a killed process costs a fork, not the imports. The loader speaks
over a socket: a configuration line and its answer when it is ready (the handshake), then a line for
each process to start (with its two pipes) or to wait for.

To a process goes a line with a list of requests, and back comes a line with replies in order; it
may answer a list in several lines. Lists are longer the faster replies come: fast requests do not
wait for the pipe, slow ones are distributed evenly. When a process hangs or dies, each of its
pending requests is asked again alone, and one that fails alone is marked as failed. So the replies,
in the order of the requests, depend neither on the lists nor on the number of processes.

A reply may take `seconds` of the process's CPU time, which a busy machine does not shorten; and
`clock_factor` times as long on the clock, for what sleeps or waits. Processes that a process starts
are not counted: who starts them limits them."""

import contextlib
import json
import os
import select
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import Any

from tasks.common.files import ArtifactError
from tasks.common.worker import memory_gb

MAX_REQUESTS = 64  # requests in a list
# seconds of work in a list: hides the latency of a pipe, and still distributes work evenly
LIST_SECONDS = 0.005
FIRST_SECONDS_PER_REQUEST = 1e-4  # the estimate before the first reply
# limit of the handshake: a process imports its libraries, perhaps on a busy machine
START_SECONDS = 120.0
# another process is started for so many seconds of work in the queue
SECONDS_PER_PROCESS = 0.1
MIN_WAIT = 0.02  # seconds until the CPU time of a slow reply is looked at again
CLOCK_TICKS = os.sysconf("SC_CLK_TCK")


class TimedOut(Exception):
    """The request took more CPU time than the limit, and its process was killed."""


class Died(Exception):
    """The process ended by itself while it worked on the request, or waited for too long."""


class PoolError(ArtifactError):
    """A process did not get ready; the message gives the reason."""


class Loader:
    """The process that loads what the others need, and forks them. Raises PoolError if it does not
    get ready."""

    def __init__(self, command: Sequence[str], configuration: bytes) -> None:
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        self.socket, theirs = socket.socketpair()
        with theirs:
            self.popen = subprocess.Popen(
                [*command, str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                env=environment,
                process_group=0,
                pass_fds=[theirs.fileno()],
            )
        self.socket.settimeout(START_SECONDS)
        self.lines = self.socket.makefile("rb")
        try:
            self.socket.sendall(configuration)
            self.ready_message = self.answer()
        except (OSError, PoolError) as error:
            self.close()
            limit = "" if memory_gb() < 0 else f" (`ulimit -v` leaves it {memory_gb():.3g} GB)"
            raise PoolError(f"a worker process did not get ready: {error}{limit}") from error
        if "failure" in self.ready_message:
            self.close()
            raise PoolError(self.ready_message["failure"])

    def answer(self) -> Any:
        """Return the next line."""
        line = self.lines.readline()
        if not line.endswith(b"\n"):
            raise PoolError("it ended, or closed its replies")
        return json.loads(line)

    def fork(self, stdin: int, stdout: int) -> int:
        """Return the pid of a new process that reads and writes these pipes."""
        socket.send_fds(self.socket, [to_line("fork")], [stdin, stdout])
        return int(self.answer())

    def wait(self, pid: int) -> int:
        """Return how a process ended, as Python's wait status."""
        self.socket.sendall(to_line(pid))
        return int(self.answer())

    def close(self) -> None:
        """Kill the loader."""
        self.lines.close()
        self.socket.close()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait()


class Process:
    """One worker process: its pending requests, oldest first, and when its next reply is due."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader
        theirs_in, self.stdin = os.pipe()
        self.stdout, theirs_out = os.pipe()
        try:
            self.pid = loader.fork(theirs_in, theirs_out)
        except (OSError, PoolError) as error:
            os.close(self.stdin)
            os.close(self.stdout)
            raise PoolError(f"a worker process could not be started: {error}") from error
        finally:
            os.close(theirs_in)
            os.close(theirs_out)
        os.set_blocking(self.stdin, False)
        self.pending: deque[int] = deque()
        self.outgoing = b""  # bytes still to be written
        self.incoming = b""  # the beginning of the next line
        self.since = time.monotonic()  # since when the next reply is awaited
        self.cpu_since = 0.0
        self.deadline = self.since  # when it is looked at again

    @property
    def idle(self) -> bool:
        """Whether the process has no pending requests."""
        return not self.pending

    def expect(self, seconds: float) -> None:
        """Start the time of the next reply."""
        self.since = time.monotonic()
        self.cpu_since = self.cpu_seconds()
        self.deadline = self.since + seconds

    def cpu_seconds(self) -> float:
        """Return the CPU time of the process so far; where the system does not tell, the clock."""
        try:
            with open(f"/proc/{self.pid}/stat", "rb") as file:
                fields = file.read().rpartition(b")")[2].split()
        except OSError:
            return time.monotonic()
        return (int(fields[11]) + int(fields[12])) / CLOCK_TICKS

    def write(self) -> None:
        """Write as much as the pipe takes now. A broken pipe shows up as the end of its replies."""
        with contextlib.suppress(BlockingIOError, BrokenPipeError):
            self.outgoing = self.outgoing[os.write(self.stdin, self.outgoing) :]

    def read(self) -> list[bytes] | None:
        """Return the complete lines that have arrived, or None when the process has ended."""
        piece = os.read(self.stdout, 1 << 16)
        *lines, self.incoming = (self.incoming + piece).split(b"\n")
        return lines if piece or lines else None

    def has_ended(self) -> bool:
        """Whether an idle process has closed its replies."""
        return bool(select.select([self.stdout], [], [], 0)[0])

    def kill(self) -> int | None:
        """Kill the process and everything in its group; return how it ended, None if the loader
        cannot tell."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        os.close(self.stdin)
        os.close(self.stdout)
        with contextlib.suppress(OSError, ValueError, PoolError):
            return self.loader.wait(self.pid)
        return None


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
    """Up to `num_processes` processes, forked by one that `command` starts. It gets `configuration`
    first and answers when it is ready; a reply may take `seconds` of CPU time."""

    def __init__(
        self,
        command: Sequence[str],
        configuration: Any,
        num_processes: int,
        seconds: float,
        clock_factor: float,
    ) -> None:
        self.command = command
        self.configuration = to_line(configuration)
        self.num_processes = num_processes
        self.seconds = seconds
        self.clock_seconds = seconds * clock_factor
        self.loader: Loader | None = None
        self.processes: list[Process] = []
        self.selector = selectors.DefaultSelector()
        self.seconds_per_request = FIRST_SECONDS_PER_REQUEST

    def handshake(self) -> Any:
        """Return the message of a loader that is ready. Raises PoolError when it cannot get
        ready."""
        if self.loader is not None and self.loader.popen.poll() is not None:
            self.close()
        if self.loader is None:
            self.loader = Loader(self.command, self.configuration)
        return self.loader.ready_message

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
        for process in [p for p in self.processes if p.has_ended()]:
            self.drop(process)
        self.handshake()
        work = Work(requests)
        while work.num_left:
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
            self.handshake()
            assert self.loader is not None
            process = Process(self.loader)
            self.processes.append(process)
            self.selector.register(process.stdout, selectors.EVENT_READ, process)

    def assign(self, process: Process, work: "Work") -> None:
        """Send the process its next list of requests."""
        size = MAX_REQUESTS
        share = -(-len(work.queue) // len(self.processes))  # of each process, rounded up
        if self.seconds_per_request * share > LIST_SECONDS:
            size = min(MAX_REQUESTS, int(LIST_SECONDS / self.seconds_per_request), share)
        process.pending.extend(work.take(max(1, size)))
        process.outgoing = to_line([work.requests[i] for i in process.pending])
        process.expect(self.seconds)
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
        """Wait for events, handle them, and look at the processes whose reply is due."""
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
            self.look_at(process, work, now)

    def look_at(self, process: Process, work: "Work", now: float) -> None:
        """Fail a process that has used up its CPU time, or waits for too long; else give it the
        rest."""
        left = self.seconds - (process.cpu_seconds() - process.cpu_since)
        until = process.since + self.clock_seconds
        if left <= 0:
            self.on_failure(process, work, TimedOut(f"no answer in {self.seconds:g} s of CPU time"))
        elif now >= until:
            reason = Died(f"no answer in {self.clock_seconds:g} s on the clock")
            self.on_failure(process, work, reason)
        else:
            process.deadline = min(now + max(left, MIN_WAIT), until)

    def receive(self, process: Process, work: "Work") -> None:
        """Read a process's replies."""
        lines = process.read()
        if lines is None:
            self.on_failure(process, work, None)
            return
        replies = [reply for line in lines for reply in json.loads(line)]
        # the estimate of seconds per request is a moving average
        if replies:
            spent = time.monotonic() - process.since
            self.seconds_per_request = 0.5 * self.seconds_per_request + 0.5 * spent / len(replies)
            process.expect(self.seconds)
        for reply in replies:
            work.set_reply(process.pending.popleft(), reply)

    def on_failure(self, process: Process, work: "Work", reason: Exception | None) -> None:
        """Drop a process that hangs, or that has ended (None). Its only pending request fails; of
        several, each is asked again alone."""
        status = self.drop(process)
        if len(process.pending) == 1:
            work.set_reply(
                process.pending[0], reason or Died(f"its process ended: {in_words(status)}")
            )
        else:
            work.requeue(process.pending)

    def drop(self, process: Process) -> int | None:
        """Stop watching a process and kill it; return how it ended."""
        self.processes.remove(process)
        for descriptor in (process.stdout, process.stdin):
            if descriptor in self.selector.get_map():
                self.selector.unregister(descriptor)
        return process.kill()

    def close(self) -> None:
        """Kill all processes. The pool can be used again and then starts new ones."""
        for process in list(self.processes):
            self.drop(process)
        if self.loader is not None:
            self.loader.close()
            self.loader = None


def in_words(status: int | None) -> str:
    """Return how a process ended."""
    if status is None:
        return "nobody knows how"
    code = os.waitstatus_to_exitcode(status)
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"status {code}"


def to_line(value: Any) -> bytes:
    """Return a value as a line of JSON."""
    return json.dumps(value).encode() + b"\n"


def python(module: str) -> list[str]:
    """Return the command that runs `module` with this Python."""
    return [sys.executable, "-m", module]
