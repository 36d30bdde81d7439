"""A pool of processes that answer JSON lines and can be killed: a process that hangs or dies is
replaced, and only the request at fault fails.

The processes run `pool_worker`. They are forks of one process, the loader, which imports their
libraries and is then a fork server (see `forks`): a killed process costs a fork, not the imports.
The loader's socket carries a configuration line and the reply when it is ready (the handshake),
then a connection for each process.

A process receives a line with a list of requests, and returns lines with replies in order; it may
answer a list in several lines. Faster replies lead to longer lists, so fast requests do not wait
for the pipe and slow ones are distributed evenly. If a process hangs or dies, each of its pending
requests is repeated alone, and a request that fails alone is marked as failed. A process that dies
may have been killed from outside, so a request has failed only if its process dies twice while
working on it alone. If the loader dies, its processes die too, and it is replaced. So the replies,
in the order of the requests, depend neither on the lists, nor on the number of processes, nor on
kills.

A reply may take `seconds` of the process's CPU time, which does not depend on the machine's load,
and `clock_factor` times as long on the clock, for requests that sleep or wait. Time in which this
process or the loader is paused, for example with its container or the machine, does not count.
Subprocesses of a worker do not count either: the worker limits them itself."""

import json
import selectors
import signal
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Sequence
from typing import Any

from tasks.common.processes import forks
from tasks.common.processes.clock import RunningClock
from tasks.common.processes.loader import LOOK_SECONDS, Loader, LoaderEnded, Process, to_line

MAX_REQUESTS = 64  # requests in a list
# seconds of work in a list: hides the latency of a pipe, and still distributes work evenly
LIST_SECONDS = 0.005
FIRST_SECONDS_PER_REQUEST = 1e-4  # the estimate before the first reply
# one more process is started per this many seconds of work in the queue
SECONDS_PER_PROCESS = 0.1
MIN_WAIT = 0.02  # seconds until the CPU time of a slow reply is checked again
MAX_DEATHS = 2  # a request fails at this many deaths of processes to which it was sent alone


class TimedOut(Exception):
    """The reply to a request whose process was killed because it took longer than a limit."""


class Died(Exception):
    """The reply to a request whose process ended at every attempt."""


class Work:
    """The requests of one call: the queue, the requests to be repeated alone, and the replies so
    far."""

    def __init__(self, requests: Sequence[Any]) -> None:
        self.requests = requests
        self.queue = deque(range(len(requests)))
        self.alone: set[int] = set()
        self.deaths: Counter[int] = Counter()  # of processes to which a request was sent alone
        self.replies: list[Any] = [None] * len(requests)
        self.num_left = len(requests)

    def take(self, size: int) -> list[int]:
        """Dequeue up to `size` requests, or one that must be sent alone; return their indices."""
        taken = [self.queue.popleft()]
        while self.queue and len(taken) < size and not {taken[0], self.queue[0]} & self.alone:
            taken.append(self.queue.popleft())
        return taken

    def requeue(self, indices: Collection[int]) -> None:
        """Put requests back into the queue, each to be sent alone."""
        self.alone |= set(indices)
        self.queue.extendleft(reversed(list(indices)))

    def may_be_repeated(self, index: int) -> bool:
        """Count the death of a process that had only this request, and return whether the request
        is repeated."""
        self.deaths[index] += index in self.alone
        return self.deaths[index] < MAX_DEATHS

    def set_reply(self, index: int, reply: Any) -> None:
        self.replies[index] = reply
        self.num_left -= 1


class Pool:
    """Up to `num_processes` processes, forked by a loader that runs `module` with `configuration`.
    A reply may take `seconds` of CPU time, and `clock_factor` times as long on the clock."""

    def __init__(
        self,
        module: str,
        configuration: Any,
        num_processes: int,
        seconds: float,
        clock_factor: float,
    ) -> None:
        self.module = module
        self.configuration = to_line(configuration)
        self.num_processes = num_processes
        self.seconds = seconds
        self.clock_seconds = seconds * clock_factor
        self.loader: Loader | None = None
        self.clock = RunningClock()  # for limits on the clock: it stops while the loader is stopped
        self.processes: list[Process] = []
        self.selector = selectors.DefaultSelector()
        self.seconds_per_request = FIRST_SECONDS_PER_REQUEST

    def handshake(self) -> Any:
        """Return the loader's message when it is ready. Raise PoolError if it cannot become
        ready."""
        return self.ready_loader().ready_message

    def ready_loader(self) -> Loader:
        """Return the loader. Start one if there is none, or if it has ended."""
        if self.loader is not None and self.loader.popen.poll() is not None:
            self.drop_loader()
        if self.loader is None:
            self.loader = Loader(self.module, self.configuration)
            self.selector.register(self.loader.socket, selectors.EVENT_READ, self.loader)
        return self.loader

    def drop_loader(self) -> None:
        """Kill the loader. Its processes die with it, and their requests are repeated."""
        if self.loader is not None:
            self.selector.unregister(self.loader.socket)
            self.loader.close()
            self.loader = None

    def map(
        self, requests: Sequence[Any], on_done: Callable[[int], object] | None = None
    ) -> list[Any]:
        """Return the reply to every request, in order: the process's reply, or an instance of
        TimedOut or Died. `on_done` is called several times a second with the number of new replies,
        and may raise to abort the call."""
        try:
            return self.run(requests, on_done or (lambda _: None))
        except BaseException:
            self.close()  # otherwise a later call would receive the replies to this one
            raise

    def run(self, requests: Sequence[Any], on_done: Callable[[int], object]) -> list[Any]:
        """Assign requests and collect replies until all have arrived; see `map`."""
        # replace processes that ended while idle: no request is at fault
        for process in [p for p in self.processes if p.has_ended()]:
            self.drop(process)
        self.clock.read()  # no request was waiting since the last call
        work = Work(requests)
        while work.num_left:
            self.start_processes(len(work.queue))
            for process in self.processes:
                if process.idle and work.queue:
                    self.assign(process, work)
            before = work.num_left
            self.poll(work)
            on_done(before - work.num_left)
        return work.replies

    def start_processes(self, num_queued: int) -> None:
        """Start a process if there is none, and more if the queue is long enough."""
        wanted = min(
            self.num_processes, 1 + int(num_queued * self.seconds_per_request / SECONDS_PER_PROCESS)
        )
        while len(self.processes) < wanted:
            process = self.new_process()
            self.processes.append(process)
            self.selector.register(process.stdout, selectors.EVENT_READ, process)

    def new_process(self) -> Process:
        """Return a new process. If the loader ends during the fork, try once with a new one."""
        try:
            return Process(self.ready_loader(), self.clock)
        except LoaderEnded:
            self.drop_loader()
            return Process(self.ready_loader(), self.clock)

    def assign(self, process: Process, work: "Work") -> None:
        size = MAX_REQUESTS
        share = -(-len(work.queue) // len(self.processes))  # per process, rounded up
        if self.seconds_per_request == FIRST_SECONDS_PER_REQUEST:
            size = 1  # the time is unknown: a list of slow requests would keep one process busy
        elif self.seconds_per_request * share > LIST_SECONDS:
            size = min(MAX_REQUESTS, int(LIST_SECONDS / self.seconds_per_request), share)
        process.pending.extend(work.take(max(1, size)))
        process.outgoing = to_line([work.requests[i] for i in process.pending])
        process.expect(self.seconds)
        self.watch(process)

    def watch(self, process: Process) -> None:
        """Write what the pipe accepts now, and watch the pipe while something is left."""
        process.write()
        watched = process.stdin in self.selector.get_map()
        if process.outgoing and not watched:
            self.selector.register(process.stdin, selectors.EVENT_WRITE, process)
        elif not process.outgoing and watched:
            self.selector.unregister(process.stdin)

    def poll(self, work: "Work") -> None:
        """Wait for events, handle them, and check the processes whose deadline has passed."""
        now = time.monotonic()
        if now - self.clock.looked >= LOOK_SECONDS:
            self.clock.read(counts=self.loader is None or not self.loader.is_stopped())
        due = min(process.deadline for process in self.processes if not process.idle)
        for key, event in self.selector.select(min(max(due - now, 0.0), LOOK_SECONDS)):
            source = key.data
            if isinstance(source, Loader):
                self.drop_loader()  # after its handshake, an event means that it has ended
            elif source not in self.processes:
                continue
            elif event & selectors.EVENT_WRITE:
                self.watch(source)
            else:
                self.receive(source, work)
        now = time.monotonic()
        for process in [p for p in self.processes if not p.idle and p.deadline < now]:
            self.look_at(process, work, now)

    def look_at(self, process: Process, work: "Work", now: float) -> None:
        """Handle the failure of a process that has used up its CPU time or its time on the clock.
        Otherwise extend its deadline."""
        left = self.seconds - (process.cpu_seconds() - process.cpu_since)
        clock_left = self.clock_seconds - (self.clock.seconds - process.clock_since)
        if left <= 0:
            reason = TimedOut(f"no answer in {self.seconds:g} s of CPU time")
            self.on_failure(process, work, reason)
        elif clock_left <= 0:
            reason = TimedOut(f"no answer in {self.clock_seconds:g} s on the clock")
            self.on_failure(process, work, reason)
        else:
            wait = min(max(left, MIN_WAIT), max(clock_left, LOOK_SECONDS))
            process.deadline = now + wait

    def receive(self, process: Process, work: "Work") -> None:
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
        """Drop a process that timed out (`reason`) or has ended (None). A single pending request
        fails if it is at fault; otherwise the pending requests are repeated, each alone."""
        status = self.drop(process)
        pending = process.pending
        if len(pending) != 1 or (reason is None and work.may_be_repeated(pending[0])):
            work.requeue(pending)
        else:
            work.set_reply(
                pending[0], reason or Died(f"its process ended twice: {in_words(status)}")
            )

    def drop(self, process: Process) -> int | None:
        """Stop watching a process and kill it. Return its exit status."""
        self.processes.remove(process)
        for descriptor in (process.stdout, process.stdin):
            if descriptor in self.selector.get_map():
                self.selector.unregister(descriptor)
        return process.kill()

    def close(self) -> None:
        """Kill all processes and their loader. The next `map` starts new ones."""
        for process in list(self.processes):
            self.drop(process)
        self.drop_loader()


def in_words(status: int | None) -> str:
    """Return a description of an exit status."""
    if status is None:
        return "its status is unknown"
    number = status - forks.KILLED
    return f"signal {signal.Signals(number).name}" if number > 0 else f"status {status}"
