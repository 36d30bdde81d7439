"""A sandbox for hostile programs: bubblewrap's namespaces, limits, and a filter of system calls.

The program can access no network, no processes but its own, no environment, and no files except
the programs and libraries of Python and the system (read-only) and an empty folder in memory. CPU
time, address space, file size, open files and the number of processes are limited inside.
Wall-clock time (without pauses), the size of replies, the memory of all processes together and the
number of files are monitored from outside, and a violation kills everything inside at once. Nothing
inside is trusted: `runner` receives inputs and returns results, but never the expected results.

Started by root, bubblewrap needs no user namespace, and the program runs under a user id without an
account, because root would be exempt from the limit on processes. Started by any other user, it
needs user namespaces. `process` is a plain process with most of these limits, for machines where
bubblewrap does not work. It protects only from accidents: files, network and the processes of the
same user stay accessible, and the program's files and processes are not counted.

Not supported: cgroups (only root could use them), nsjail, processors other than x86-64 and ARM."""

import base64
import contextlib
import ctypes
import inspect
import json
import mmap
import os
import selectors
import shutil
import signal
import subprocess
import time
from functools import cache
from pathlib import Path
from typing import Any

from tasks.common.files import temporary_folder
from tasks.common.processes.clock import RunningClock
from tasks.grading.programs import runner
from tasks.grading.programs.command import (
    FOLDER,
    Sandbox,
    SandboxError,
    bubblewrap,
    interpreter,
    packages,
    python,
)

START_SECONDS = 20.0  # until the interpreter inside is ready, on a busy machine
FILE_BYTES = 8 << 20  # of any file inside, including standard output
REPLY_BYTES = 2 * FILE_BYTES  # outputs are in base64
MAX_PROCESSES = 24  # processes and threads inside
MAX_FILES = 10_000  # files, folders and links inside
PR_SET_CHILD_SUBREAPER = 36
CHECK_SECONDS = 0.1  # between two checks of the memory of all processes and the number of files
END_SECONDS = 0.002  # between two checks of whether a process has ended
KILLS = (signal.SIGKILL, signal.SIGTERM)  # may come from an operator or the out-of-memory killer
MAX_DIGITS = 5_000  # of an integer in a reply
HASHED_DIGITS = 18  # integers with at most this many digits all have distinct hashes
MAX_LARGE = 10_000  # integers with more digits than that, per reply


class Stopped(Exception):
    """Raised if the program was stopped or has ended; the message contains the reason."""


class Killed(Stopped):
    """Raised after SIGKILL or SIGTERM; if `outside`, the program cannot have sent the signal."""

    def __init__(self, words: str, outside: bool) -> None:
        super().__init__(words)
        self.outside = outside


class Session:
    """One interpreter in a sandbox, and the requests to it. Its wall-clock limits are measured by
    `clock`. Use it as a context manager."""

    def __init__(self, sandbox: Sandbox, clock: RunningClock | None = None) -> None:
        self.clock = clock or RunningClock()
        self.next_check = 0.0
        self.memory = sandbox.memory_mb << 20
        self.selector = selectors.DefaultSelector()
        self.incoming = b""
        self.inner: list[int] = []  # bubblewrap's own child, the first process of the namespace
        self.files: int | None = None  # a descriptor of bubblewrap's folder
        self.folder: str | None = None
        adopt_orphans(True)
        with contextlib.ExitStack() as stack:
            if sandbox.kind == "process":
                self.folder = str(stack.enter_context(temporary_folder(None, "program")))
                command, descriptors = interpreter(python()), list[int]()
            else:
                command, descriptors = stack.enter_context(bubblewrap(sandbox))
            try:
                self.popen = subprocess.Popen(
                    [*command, "-c", inspect.getsource(runner)],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.PIPE,
                    bufsize=0,
                    env={"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "LANG": "C.UTF-8"},
                    cwd=self.folder or "/",
                    pass_fds=descriptors,
                    start_new_session=True,
                )
            except OSError as error:
                raise SandboxError(f"{command[0]} cannot be started: {error}") from error
            self.ends = stack.pop_all() if self.folder else contextlib.ExitStack()
        assert self.popen.stdin is not None
        assert self.popen.stdout is not None
        self.requests = self.popen.stdin.fileno()
        self.replies = self.popen.stdout.fileno()
        os.set_blocking(self.requests, False)
        self.selector.register(self.replies, selectors.EVENT_READ)
        self.start(sandbox)

    def start(self, sandbox: Sandbox) -> None:
        """Wait for the interpreter to set its limits. Raise SandboxError or Killed if it fails."""
        configuration = {
            "memory": self.memory,
            "file_bytes": FILE_BYTES,
            # for a plain process, the limit would count the user's other processes
            "processes": MAX_PROCESSES if sandbox.kind == "bubblewrap" else None,
            "packages": packages() if sandbox.packages else None,
            "parent_death": sandbox.kind == "process",
        }
        try:
            reply = self.ask(configuration, START_SECONDS)
            if reply != {"ready": True}:
                raise SandboxError(f"the sandbox does not start: its reply is {str(reply)[:200]}")
            self.inner = children_of(self.popen.pid)
            if sandbox.kind == "bubblewrap":
                self.files = folder_of(self.inner)
        except Killed as error:  # the program was not loaded yet
            self.close()
            raise Killed(str(error), outside=True) from error
        except Stopped as error:
            message = self.errors()
            self.close()
            raise SandboxError(f"the sandbox does not start: {message or error}") from error
        except SandboxError:
            self.close()
            raise

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Return the reply to a request. Raise Stopped if no readable reply arrives in time; the
        session is then unusable."""
        try:
            line = self.exchange(json.dumps(request).encode() + b"\n", seconds)
            reply = json.loads(line, parse_int=Integers().read)
        except (ValueError, RecursionError, MemoryError) as error:
            raise Stopped(f"it gave a result that cannot be read ({error})"[:200]) from error
        if not isinstance(reply, dict):
            raise Stopped("it wrote something else in place of its result")
        return reply

    def exchange(self, outgoing: bytes, seconds: float) -> bytes:
        """Write a line and return the reply line. Raise Stopped as `ask` does."""
        until = self.clock.read() + seconds
        parts = [self.incoming]
        size = 0
        if outgoing:
            self.selector.register(self.requests, selectors.EVENT_WRITE)
        while b"\n" not in parts[-1]:
            self.check_limits()
            for key, _ in self.selector.select(min(CHECK_SECONDS, until - self.clock.seconds)):
                if key.fd == self.requests:
                    outgoing = self.write(outgoing)
                    continue
                part = os.read(self.replies, 1 << 16)
                size += len(part)
                if not part:
                    raise self.ending(until)
                if size > REPLY_BYTES:
                    raise Stopped(f"output limit: its result is longer than {REPLY_BYTES} bytes")
                parts.append(part)
            if self.clock.read() >= until and b"\n" not in parts[-1]:
                raise Stopped(f"time limit: no result in {seconds:g} s on the clock")
        line, _, self.incoming = b"".join(parts).partition(b"\n")
        if self.incoming or outgoing:
            raise Stopped("it wrote something else in place of its result")
        return line

    def write(self, outgoing: bytes) -> bytes:
        """Write as much as the pipe accepts now, and return the rest. A broken pipe is no error
        here: `exchange` then finds the reply pipe closed."""
        try:
            outgoing = outgoing[os.write(self.requests, outgoing[: 1 << 16]) :]
        except BlockingIOError:
            return outgoing
        except BrokenPipeError:
            outgoing = b""
        if not outgoing:
            self.selector.unregister(self.requests)
        return outgoing

    def check_limits(self) -> None:
        """Raise Stopped if all processes inside together use more than twice the memory limit of a
        process, or if there are too many files. Checks are at least CHECK_SECONDS apart."""
        if time.monotonic() < self.next_check:
            return
        held = sum(resident_bytes(pid) for pid in family(self.popen.pid))
        if held > 2 * self.memory:
            raise Stopped(f"memory limit: all its processes together use {held >> 20} MB")
        if self.files is not None:
            files = os.fstatvfs(self.files)
            if files.f_files - files.f_ffree > MAX_FILES:
                raise Stopped(f"file limit: it has made more than {MAX_FILES} files")
        self.next_check = time.monotonic() + CHECK_SECONDS

    def ending(self, until: float) -> Stopped:
        """Wait, at most until the time `until`, for the exit of an interpreter that has closed its
        reply pipe. Return the error that the exit status indicates."""
        while (code := self.exit_code()) is None:
            if self.clock.read() >= until:
                return Stopped("it closed the pipe for its results")
            self.check_limits()
            time.sleep(END_SECONDS)
        number = code - 128 if code > 128 else -code
        words = signal_message(number) or "it ended without a result"
        # a negative code: bubblewrap itself was killed, which the program cannot do
        outside = code < 0 and self.folder is None
        return Killed(words, outside) if number in KILLS else Stopped(words)

    def exit_code(self) -> int | None:
        """Return the exit status, or a signal as a negative number; None if the process is running.

        Only `close` reaps the process, so the pid that it kills cannot have been reused."""
        how = os.WEXITED | os.WNOWAIT | os.WNOHANG
        ended = os.waitid(os.P_PID, self.popen.pid, how)
        if ended is None:
            return None
        return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status

    def errors(self) -> str:
        """Return the text that bubblewrap or the interpreter has written to standard error."""
        assert self.popen.stderr is not None
        os.set_blocking(self.popen.stderr.fileno(), False)
        return (self.popen.stderr.read(2000) or b"").decode("utf-8", "replace").strip()

    def close(self) -> None:
        """Kill everything inside, and wait until it has ended. When a namespace's first process
        ends, the kernel kills the others; a plain process is killed with its process group."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.popen.pid, signal.SIGKILL)
        self.popen.wait()
        for pid in self.inner:
            reap(pid)
        adopt_orphans(False)
        self.selector.close()
        if self.files is not None:
            os.close(self.files)
        for pipe in (self.popen.stdin, self.popen.stdout, self.popen.stderr):
            if pipe is not None:
                pipe.close()
        self.ends.close()


def folder_of(inner: list[int]) -> int:
    """Return a descriptor of the sandbox's folder, to count its files, or raise SandboxError."""
    try:
        return os.open(f"/proc/{inner[0]}/root{FOLDER}", os.O_PATH | os.O_DIRECTORY)
    except (OSError, IndexError) as error:
        raise SandboxError(f"the number of files inside cannot be limited: {error}") from error


def signal_message(number: int) -> str:
    """Return a message for the signal that killed a program; an empty string without a signal."""
    if number == signal.SIGXCPU:
        return "time limit: it used up its CPU time"
    if 0 < number < signal.NSIG:
        return f"it was ended by {signal.Signals(number).name}"
    return ""


class Integers:
    """Parses the integers of one reply. It rejects integers that are slow to parse, and too many
    integers whose hashes may collide, because a set of these would take quadratic time."""

    def __init__(self) -> None:
        self.num_large = 0

    def read(self, text: str) -> int:
        """Parse an integer. Raise ValueError if it is too long, or after too many large ones."""
        if len(text) > MAX_DIGITS:
            raise ValueError(f"an integer of {len(text)} digits")
        self.num_large += len(text) > HASHED_DIGITS
        if self.num_large > MAX_LARGE:
            raise ValueError(f"more than {MAX_LARGE} integers of over {HASHED_DIGITS} digits")
        return int(text)


def adopt_orphans(adopt: bool) -> None:
    """Start or stop adopting orphaned descendants. If bubblewrap ends before its child, this
    process must wait for the child, as a container's first process might not reap orphans."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, int(adopt), 0, 0, 0)


def reap(pid: int) -> None:
    """Kill an adopted process and wait for its end; do nothing if it is not our child."""
    with contextlib.suppress(ChildProcessError):
        if os.waitpid(pid, os.WNOHANG) == (0, 0):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def family(pid: int) -> list[int]:
    """Return the ids of a process and of all its descendants that still exist."""
    found = [pid]
    for parent in found:
        found += children_of(parent)
    return found


def children_of(pid: int) -> list[int]:
    """Return the process ids of a process's children; an empty list if it has ended."""
    found: list[int] = []
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += map(int, children.read_text().split())
    return found


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process; 0 if it has ended."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0
    return pages * mmap.PAGESIZE


@cache
def problem(sandbox: Sandbox) -> str | None:
    """Return why this sandbox does not work on this machine, or None if a test program has run in
    it. Cached for the process."""
    if sandbox.kind == "bubblewrap" and shutil.which("bwrap") is None:
        return "bubblewrap is not installed"
    program = {"load": "print(6 * 7)", "name": "test", "run": False}
    try:
        with Session(sandbox) as session:
            session.ask({**program, "seconds": START_SECONDS}, START_SECONDS)
            reply = session.ask({"stdin": "", "seconds": START_SECONDS}, START_SECONDS)
    except (SandboxError, Stopped, OSError) as error:
        return str(error)
    right = reply.get("status") == 0 and output_of(reply.get("stdout")) == "42\n"
    return None if right else f"a test program ends with {str(reply)[:200]}"


def output_of(encoded: Any) -> str | None:
    """Decode a text from base64; return None for anything else."""
    try:
        return base64.b64decode(encoded, validate=True).decode("utf-8", "replace")
    except (TypeError, ValueError):
        return None
