"""A place where a hostile program can run: bubblewrap's namespaces, limits, and a filter of system
calls.

The program sees no network, no process but its own, no environment, and no files but Python's
(read-only) and an empty folder in memory. Limits of CPU time, address space, file size, open files
and the number of processes hold inside; the clock (pauses left out), the size of replies, the
memory of all processes together and the number of files are watched from outside, and everything
inside is killed at once. Nothing inside is trusted: `sandbox_runner` is told inputs and tells
results, and is never told what is right.

Started by root, bubblewrap needs no user namespace, and the program runs under a user id that
nobody has: root's own id would be exempt from the limit on processes. Started by anybody else, it
needs user namespaces. `process` is a plain process with the same limits, for machines without
either: it protects from accidents, and from nothing else, because files, network and the processes
of the same user stay in reach, and nobody counts its files.

Left out: cgroups (only root could use them), nsjail, processors other than x86-64 and ARM."""

import base64
import contextlib
import ctypes
import inspect
import json
import os
import selectors
import shutil
import signal
import subprocess
import time
from functools import cache
from pathlib import Path
from typing import Any

from tasks.common.clock import RunningClock
from tasks.common.files import temporary_folder
from tasks.common.params import ParamsError
from tasks.grading import sandbox_runner
from tasks.grading.sandbox_command import (
    FOLDER,
    Sandbox,
    SandboxError,
    bubblewrap,
    interpreter,
    packages,
    python,
)

START_SECONDS = 20.0  # until the interpreter inside is ready, on a busy machine
FILE_BYTES = 8 << 20  # of any file inside; standard output is one
REPLY_BYTES = 2 * FILE_BYTES  # outputs are in base64
MAX_PROCESSES = 24  # processes and threads inside
MAX_FILES = 10_000  # and folders and links, inside
PR_SET_CHILD_SUBREAPER = 36
LOOK_SECONDS = 0.1  # between two looks at the memory of all processes and the number of files
END_SECONDS = 0.002  # between two looks at a process that ends
SENT = (signal.SIGKILL, signal.SIGTERM)  # what kills from outside: an operator, a lack of memory
MAX_DIGITS = 5_000  # of an integer in a reply
HASHED_DIGITS = 18  # integers of so many digits all have hashes of their own
MAX_LARGE = 10_000  # integers of more digits in a reply
ADVICE = (
    "Install bubblewrap (Debian: apt-get install bubblewrap) and, unless root runs this, allow "
    "unprivileged user namespaces; a container must be allowed to make namespaces. Or set "
    "`sandbox: process`, which does not protect from hostile programs"
)


class Stopped(Exception):
    """The program was stopped, or ended by itself; the message says why."""


class Killed(Stopped):
    """A signal ended the program that it can have sent itself; `outside` where it cannot."""

    def __init__(self, words: str, outside: bool) -> None:
        super().__init__(words)
        self.outside = outside


class Session:
    """One interpreter in a sandbox, and the conversation with it. Its limits on the clock count by
    `clock`. Use as a context manager."""

    def __init__(self, sandbox: Sandbox, clock: RunningClock | None = None) -> None:
        self.clock = clock or RunningClock()
        self.next_look = 0.0
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
                    [*command, "-c", inspect.getsource(sandbox_runner)],
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
        """Wait until the interpreter has limited itself. Raises SandboxError when it does not."""
        configuration = {
            "memory": self.memory,
            "file_bytes": FILE_BYTES,
            # as a plain process its user's other processes would count
            "processes": MAX_PROCESSES if sandbox.kind == "bubblewrap" else None,
            "packages": packages() if sandbox.packages else None,
            "parent_death": sandbox.kind == "process",
        }
        try:
            reply = self.ask(configuration, START_SECONDS)
            if reply != {"ready": True}:
                raise SandboxError(f"the sandbox does not start: it says {str(reply)[:200]}")
            self.inner = children_of(self.popen.pid)
            if sandbox.kind == "bubblewrap":
                self.files = folder_of(self.inner)
        except Killed as error:  # nothing of the program was there yet
            self.close()
            raise Killed(str(error), outside=True) from error
        except Stopped as error:
            said = self.errors()
            self.close()
            raise SandboxError(f"the sandbox does not start: {said or error}") from error
        except SandboxError:
            self.close()
            raise

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def ask(self, request: dict[str, Any], seconds: float) -> dict[str, Any]:
        """Return the reply to a request. Raises Stopped when there is none in time, or none that
        can be read; then the session is of no more use."""
        try:
            line = self.exchange(json.dumps(request).encode() + b"\n", seconds)
            reply = json.loads(line, parse_int=Integers().read)
        except (ValueError, RecursionError, MemoryError) as error:
            raise Stopped(f"it gave a result that cannot be read ({error})"[:200]) from error
        if not isinstance(reply, dict):
            raise Stopped("it wrote something else in place of its result")
        return reply

    def exchange(self, outgoing: bytes, seconds: float) -> bytes:
        """Write a line and return the one that comes back."""
        until = self.clock.look() + seconds
        parts = [self.incoming]
        size = 0
        if outgoing:
            self.selector.register(self.requests, selectors.EVENT_WRITE)
        while b"\n" not in parts[-1]:
            self.look()
            for key, _ in self.selector.select(min(LOOK_SECONDS, until - self.clock.seconds)):
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
            if self.clock.look() >= until and b"\n" not in parts[-1]:
                raise Stopped(f"time limit: no result in {seconds:g} s on the clock")
        line, _, self.incoming = b"".join(parts).partition(b"\n")
        if self.incoming or outgoing:
            raise Stopped("it wrote something else in place of its result")
        return line

    def write(self, outgoing: bytes) -> bytes:
        """Write what the pipe takes now, and return the rest. A broken pipe shows up as the end of
        the replies."""
        try:
            outgoing = outgoing[os.write(self.requests, outgoing[: 1 << 16]) :]
        except BlockingIOError:
            return outgoing
        except BrokenPipeError:
            outgoing = b""
        if not outgoing:
            self.selector.unregister(self.requests)
        return outgoing

    def look(self) -> None:
        """Raise Stopped when all processes inside together hold more than twice the limit of one,
        or have made too many files. A call within LOOK_SECONDS of the last does nothing."""
        if time.monotonic() < self.next_look:
            return
        held = sum(resident_bytes(pid) for pid in family(self.popen.pid))
        if held > 2 * self.memory:
            raise Stopped(f"memory limit: all its processes together hold {held >> 20} MB")
        if self.files is not None:
            files = os.fstatvfs(self.files)
            if files.f_files - files.f_ffree > MAX_FILES:
                raise Stopped(f"file limit: it has made more than {MAX_FILES} files")
        self.next_look = time.monotonic() + LOOK_SECONDS

    def ending(self, until: float) -> Stopped:
        """Return how the interpreter ended, which has closed its replies. It may take until that
        time to end."""
        while (code := self.exit_code()) is None:
            if self.clock.look() >= until:
                return Stopped("it closed the pipe for its results")
            self.look()
            time.sleep(END_SECONDS)
        number = code - 128 if code > 128 else -code
        words = signal_words(number) or "it ended without a result"
        # bubblewrap itself is out of the program's reach, and ends with a status
        outside = code < 0 and self.folder is None
        return Killed(words, outside) if number in SENT else Stopped(words)

    def exit_code(self) -> int | None:
        """Return the exit status, or a signal below 0; None if the process goes on.

        It stays a zombie, so that its number, by which `close` kills, is nobody else's."""
        how = os.WEXITED | os.WNOWAIT | os.WNOHANG
        ended = os.waitid(os.P_PID, self.popen.pid, how)
        if ended is None:
            return None
        return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status

    def errors(self) -> str:
        """Return what bubblewrap or the interpreter has written to standard error."""
        assert self.popen.stderr is not None
        os.set_blocking(self.popen.stderr.fileno(), False)
        return (self.popen.stderr.read(2000) or b"").decode("utf-8", "replace").strip()

    def close(self) -> None:
        """Kill everything inside, and wait until it is gone. With the first process of a namespace
        the kernel kills all others; a plain process takes its group with it."""
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
    """Return a descriptor of the folder inside, whose files are counted by it."""
    try:
        return os.open(f"/proc/{inner[0]}/root{FOLDER}", os.O_PATH | os.O_DIRECTORY)
    except (OSError, IndexError) as error:
        raise SandboxError(f"the number of files inside cannot be limited: {error}") from error


def signal_words(number: int) -> str:
    """Return in words what a signal says of a program; nothing for no signal."""
    if number == signal.SIGXCPU:
        return "time limit: it used up its CPU time"
    if 0 < number < signal.NSIG:
        return f"it was ended by {signal.Signals(number).name}"
    return ""


class Integers:
    """Reads the integers of one reply. Those that take long to read, and many that can have the
    same hash, are refused: a set of these would take quadratic time."""

    def __init__(self) -> None:
        self.num_large = 0

    def read(self, text: str) -> int:
        """Return an integer. Raises ValueError for one too many or too long."""
        if len(text) > MAX_DIGITS:
            raise ValueError(f"an integer of {len(text)} digits")
        self.num_large += len(text) > HASHED_DIGITS
        if self.num_large > MAX_LARGE:
            raise ValueError(f"more than {MAX_LARGE} integers of over {HASHED_DIGITS} digits")
        return int(text)


def adopt_orphans(wanted: bool) -> None:
    """Become the parent of processes whose parent ends, or no longer. Where bubblewrap ends before
    its child, somebody must wait for that: in a container the first process may wait for nobody."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, int(wanted), 0, 0, 0)


def reap(pid: int) -> None:
    """Kill an adopted process and wait for its end; nothing happens if it is not ours."""
    with contextlib.suppress(ChildProcessError):
        if os.waitpid(pid, os.WNOHANG) == (0, 0):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def family(pid: int) -> list[int]:
    """Return a process and all that come from it, as far as they are there."""
    found = [pid]
    for parent in found:
        found += children_of(parent)
    return found


def children_of(pid: int) -> list[int]:
    """Return the children of all threads of a process; none for one that is gone."""
    found: list[int] = []
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += map(int, children.read_text().split())
    return found


def resident_bytes(pid: int) -> int:
    """Return the memory that a process holds; none for one that is gone."""
    try:
        pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    except (OSError, IndexError):
        return 0
    return pages * resource_page()


@cache
def resource_page() -> int:
    """Return the bytes of a page."""
    return os.sysconf("SC_PAGE_SIZE")


# ---------------------------------------------------------------------------------- checks


@cache
def problem(sandbox: Sandbox) -> str | None:
    """Return what is wrong with this sandbox here, or None if a program has run in it. Each
    process asks once."""
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


def output_of(encoded: object) -> str | None:
    """Return a text from the base64 of its bytes, or None for anything else."""
    try:
        return base64.b64decode(str(encoded), validate=True).decode("utf-8", "replace")
    except ValueError:
        return None


def require(sandbox: Sandbox) -> None:
    """Raise ParamsError if this sandbox does not work here."""
    if (reason := problem(sandbox)) is not None:
        raise ParamsError(f"the sandbox {sandbox.kind!r} does not work here: {reason}. {ADVICE}")
