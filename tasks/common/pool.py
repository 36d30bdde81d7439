"""A pool of processes that answer JSON lines and can be killed: one that hangs or dies is replaced,
and only the request at fault fails.

The processes run `tasks/common/pool_worker.py`. They are forks of one, the loader, which imports
what they need and then only forks: a killed process costs a fork, not the imports. The loader
speaks over a socket (see `loader`): a configuration line and its answer when it is ready (the
handshake), then a line for each process to start (with its two pipes) or to wait for.

To a process goes a line with a list of requests, and back comes a line with replies in order; it
may answer a list in several lines. Lists are longer the faster replies come: fast requests do not
wait for the pipe, slow ones are distributed evenly. When a process hangs or dies, each of its
pending requests is asked again alone, and one that fails alone is marked as failed. A process that
dies may have been killed from outside, so only a request whose process dies twice alone has failed.
A loader that dies takes its processes along, and is replaced. So the replies, in the order of the
requests, depend neither on the lists, nor on the number of processes, nor on who is killed.

A reply may take `seconds` of the process's CPU time, which a busy machine does not shorten; and
`clock_factor` times as long on the clock, for what sleeps or waits, pauses of the machine left out.
Processes that a process starts are not counted: who starts them limits them."""

import json
import os
import selectors
import signal
import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from typing import Any

from tasks.common.clock import BEAT_SECONDS
from tasks.common.loader import Loader, LoaderEnded, Process, to_line

MAX_REQUESTS = 64  # requests in a list
# seconds of work in a list: hides the latency of a pipe, and still distributes work evenly
LIST_SECONDS = 0.005
FIRST_SECONDS_PER_REQUEST = 1e-4  # the estimate before the first reply
# another process is started for so many seconds of work in the queue
SECONDS_PER_PROCESS = 0.1
MIN_WAIT = 0.02  # seconds until the CPU time of a slow reply is looked at again
MAX_DEATHS = 2  # of processes that had nothing but one request


class TimedOut(Exception):
    """The request took more time than a limit, and its process was killed."""


class Died(Exception):
    """The process ended while it worked on the request, however often it was asked."""


class Work:
    """The requests of one call: those in the queue, those to be asked alone, and the replies so
    far."""

    def __init__(self, requests: Sequence[Any]) -> None:
        self.requests = requests
        self.queue = deque(range(len(requests)))
        self.alone: set[int] = set()
        self.deaths: Counter[int] = Counter()  # of processes to which a request was sent alone
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

    def may_be_repeated(self, index: int) -> bool:
        """Count the death of a process that had only this request, and return whether the request
        is asked again."""
        self.deaths[index] += index in self.alone
        return self.deaths[index] < MAX_DEATHS

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
        return self.ready_loader().ready_message

    def ready_loader(self) -> Loader:
        """Return the loader; one that has ended is replaced."""
        if self.loader is not None and self.loader.popen.poll() is not None:
            self.drop_loader()
        if self.loader is None:
            self.loader = Loader(self.command, self.configuration)
            self.selector.register(self.loader.socket, selectors.EVENT_READ, self.loader)
        return self.loader

    def drop_loader(self) -> None:
        """Kill the loader. Its processes die with it, and their requests are asked again."""
        if self.loader is not None:
            self.selector.unregister(self.loader.socket)
            self.loader.close()
            self.loader = None

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
        self.ready_loader().clock.look()  # since the last call no request was waiting
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
            process = self.new_process()
            self.processes.append(process)
            self.selector.register(process.stdout, selectors.EVENT_READ, process)

    def new_process(self) -> Process:
        """Return a new process. A loader that ends over it, killed from outside, is replaced."""
        try:
            return Process(self.ready_loader())
        except LoaderEnded:
            self.drop_loader()
            return Process(self.ready_loader())

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
            source = key.data
            if isinstance(source, Loader):
                self.hear(source)
            elif source not in self.processes:
                continue
            elif event & selectors.EVENT_WRITE:
                self.watch(source)
            else:
                self.receive(source, work)
        now = time.monotonic()
        for process in [p for p in self.processes if not p.idle and p.deadline < now]:
            self.look_at(process, work, now)

    def hear(self, loader: Loader) -> None:
        """Take a beat of the loader's, or notice its end."""
        try:
            loader.read()
        except LoaderEnded:
            self.drop_loader()

    def look_at(self, process: Process, work: "Work", now: float) -> None:
        """Fail a process that has used up its CPU time, or waits for too long; else give it the
        rest."""
        left = self.seconds - process.cpu_seconds_spent()
        clock_left = self.clock_seconds - process.clock_seconds_spent()
        if left <= 0:
            reason = TimedOut(f"no answer in {self.seconds:g} s of CPU time")
            self.on_failure(process, work, reason)
        elif clock_left <= 0:
            reason = TimedOut(f"no answer in {self.clock_seconds:g} s on the clock")
            self.on_failure(process, work, reason)
        else:
            wait = min(max(left, MIN_WAIT), max(clock_left, BEAT_SECONDS))
            process.deadline = now + wait

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

    def on_failure(self, process: Process, work: "Work", reason: TimedOut | None) -> None:
        """Drop a process that hangs, or that has ended (None). Its only pending request fails, if
        it is at fault; else what is pending is asked again, each alone."""
        status = self.drop(process)
        pending = process.pending
        if len(pending) != 1 or (reason is None and work.may_be_repeated(pending[0])):
            work.requeue(pending)
        else:
            work.set_reply(
                pending[0], reason or Died(f"its process ended twice: {in_words(status)}")
            )

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
        self.drop_loader()


def in_words(status: int | None) -> str:
    """Return how a process ended."""
    if status is None:
        return "nobody knows how"
    code = os.waitstatus_to_exitcode(status)
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"status {code}"


def python(module: str) -> list[str]:
    """Return the command that runs `module` with this Python."""
    return [sys.executable, "-m", module]
