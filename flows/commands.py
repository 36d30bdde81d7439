"""dvc as a subprocess: what it says (graph, status), and what it does (bring one stage up to date).

One dvc process serves a whole run of the flow (see `flows.launch`), or as many as stages may run
side by side: dvc's own locks keep them apart (each holds the repository's lock for as long as it
reads or writes dvc.lock, and not while its stage runs). It runs in its own process
group, so that Ctrl-C reaches the flow alone and the flow ends the whole group: first with an
interrupt, which dvc itself waits out while the stage saves what it has and leaves; then, after the
grace time, by killing. (SIGTERM would end dvc at once, and the stage with it, before it could
save.) A flow that is killed itself takes dvc along, and dvc the stage: each asked the kernel for
that."""

import fcntl
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from flows import lock
from flows.output import Output
from tasks.common import forks
from tasks.common.files import temporary_folder

ROOT = Path(__file__).resolve().parent.parent
GRACE_SECONDS = 20.0
POLL_SECONDS = 0.05
LOOK_SECONDS = 1.0
NO_GIT = (
    "outside of a git repository, say once that this is meant: dvc config --local core.no_scm true"
)
HELD = re.compile("is being blocked by:|RWLock-file")
EDGE = re.compile(r'^"(?P<node>[^"]+)"(?: -> "(?P<dependent>[^"]+)")?;?$', re.MULTILINE)


class CommandError(RuntimeError):
    """dvc could not answer; its own words are on the terminal."""


class Dvc:
    """A dvc process, for as long as the block lasts. Its methods raise CommandError when it fails;
    whatever interrupts a wait ends the whole group. With `is_labelled`, what a stage writes is
    passed on line by line, with the stage's name before it."""

    def __init__(self, *, is_labelled: bool = False) -> None:
        requests, to_dvc = os.pipe()
        from_dvc, answers = os.pipe()
        self.output = Output(is_labelled=is_labelled)
        stdout, stderr = self.output.ends
        self.child = subprocess.Popen(
            launcher("dvc", str(requests), str(answers)),
            cwd=ROOT,
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=stdout,
            stderr=stderr,
            pass_fds=(requests, answers),
            process_group=0,
        )
        self.output.start()
        os.close(requests)
        os.close(answers)
        self.requests, self.answers = os.fdopen(to_dvc, "w"), os.fdopen(from_dvc, "rb", buffering=0)
        self.stack = ExitStack()
        self.extra: dict[str, str] = {}  # environment of the stages, beside the flow's own
        self.watch: Callable[[Output], object] | None = None  # looks on, once a second
        self.is_ended = False

    def __enter__(self) -> "Dvc":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self.stack:
            # one that has answered with an error waits for a request, and leaves by itself
            self.end(interrupt=error is not None and not isinstance(error, CommandError))
            self.output.join()
            self.answers.close()

    def end(self, interrupt: bool) -> None:
        """End the process: it leaves when it reads that there are no more requests."""
        end_all([self], interrupt=interrupt)

    def fork_stages(self) -> None:
        """Start the process that stages are forked from, where this machine allows it. It belongs
        to dvc's process group, and ends with it."""
        if forks.ADDRESS in self.extra or not forks.are_possible():
            return
        folder = self.stack.enter_context(temporary_folder(None, "winnow"))
        address = str(folder / "forks")
        server = subprocess.Popen(
            launcher("forks", address),
            cwd=ROOT,
            env=environment(),
            stdin=subprocess.DEVNULL,
            process_group=self.child.pid,
        )
        self.stack.callback(server.wait)
        self.extra[forks.ADDRESS] = address

    def ask(self, *arguments: str, stage: str | None = None) -> Any:
        """dvc's answer to one command line. With `stage` it may write to the terminal, and says
        whether it started that stage's command."""
        try:
            environ = {**environment(), **self.extra}
            request = {"arguments": arguments, "stage": stage, "environment": environ}
            self.requests.write(json.dumps(request) + "\n")
            self.requests.flush()
            return json.loads(self.read_line())
        except (BrokenPipeError, ValueError) as error:
            if self.is_ended:  # by another thread, which was interrupted
                raise KeyboardInterrupt from error
            raise CommandError(
                f"dvc ended while it was asked for {' '.join(arguments)}; more above"
            ) from error
        except BaseException:  # an interrupt: the stage saves now, not when all else has ended
            self.end(interrupt=True)
            raise

    def read_line(self) -> bytes:
        """The next line that dvc sends; what there was of it when dvc has ended.

        The wait looks up a few times a second: a library's signal handler may keep a blocked one
        from being interrupted."""
        line, next_look = b"", time.monotonic() + LOOK_SECONDS
        while not line.endswith(b"\n"):
            if self.watch and time.monotonic() >= next_look:
                self.watch(self.output)
                next_look = time.monotonic() + LOOK_SECONDS
            ready, _, _ = select.select([self.answers], [], [], POLL_SECONDS)
            if ready:
                part = self.answers.read(1 << 16)
                if not part:
                    break
                line += part
        return line

    def ask_and_read(self, *arguments: str, stage: str | None = None) -> Any:
        """As `ask`. What was written is then in `output`."""
        self.output.lines.clear()
        answer = self.ask(*arguments, stage=stage)
        self.output.settle()
        return answer

    def look(self, *arguments: str) -> str:
        """What a command that only looks has printed."""
        answer = self.ask_and_read(*arguments)
        if answer["code"]:
            said = " ".join(self.output.lines.tail)
            remedies = [NO_GIT] if "is not a git repository" in said else broken_locks()
            remedies = remedies or [*lock.refused(said), *held(said)]
            remedy = "; ".join(remedies) or "its own words are above"
            raise CommandError(f"dvc {' '.join(arguments)} failed; {remedy}")
        return str(answer["output"])

    def graph(self) -> dict[str, set[str]]:
        """Every stage with the stages it needs, in the order in which dvc names them."""
        return parse_graph(self.look("dag", "--dot"))

    def status(self, *stages: str) -> dict[str, list[Any]]:
        """What has changed, by stage, as dvc words it; a stage that is up to date is not in it."""
        changed: dict[str, list[Any]] = json.loads(
            self.look("--wait-for-lock", "status", "--json", *stages)
        )
        return changed

    def repro(self, stage: str, force: bool = False) -> tuple[int, bool]:
        """Bring one stage up to date, looking at nothing upstream: (exit status, whether its
        command was started). What it wrote is then in `output`."""
        options = ["--single-item", *(["--force"] if force else [])]
        # another dvc may hold the lock when the stage has ended: its work is not lost for that
        answer = self.ask_and_read("--wait-for-lock", "repro", *options, stage, stage=stage)
        return int(answer["code"]), bool(answer["started"])


def environment() -> dict[str, str]:
    """This environment, with the `python` of the stages' commands being the one that runs the
    flow."""
    folder = os.path.dirname(sys.executable)
    return {**os.environ, "PATH": os.pathsep.join([folder, os.environ.get("PATH", os.defpath)])}


def launcher(*arguments: str) -> list[str]:
    """The command line of a Python module that is to end with this process (see `flows.launch`)."""
    return [sys.executable, "-m", "flows.launch", str(os.getpid()), *arguments]


def parse_graph(dot: str) -> dict[str, set[str]]:
    """The nodes and edges of Graphviz text as stage -> stages it needs."""
    needs: dict[str, set[str]] = {}
    for match in EDGE.finditer(dot):
        needs.setdefault(match["node"], set())
        if match["dependent"]:
            needs.setdefault(match["dependent"], set()).add(match["node"])
    return needs


def end_all(dvcs: Sequence[Dvc], interrupt: bool) -> None:
    """End dvc processes, all at once: each stage saves while the others do."""
    for dvc in dvcs:
        dvc.is_ended = True
        with suppress(BrokenPipeError):
            dvc.requests.close()
    end_groups([dvc.child for dvc in dvcs], interrupt=interrupt)


def end_group(child: "subprocess.Popen[Any]") -> None:
    """Interrupt one group and end it, as `end_groups` does."""
    end_groups([child])


def end_groups(
    children: Sequence["subprocess.Popen[Any]"],
    grace: float = GRACE_SECONDS,
    interrupt: bool = True,
) -> None:
    """Interrupt the groups of `children`, wait for them up to `grace` seconds, and kill what is
    left of any. None is killed while another may still need it."""
    deadline = time.monotonic() + grace
    try:
        for child in children if interrupt else ():
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGINT)
        for child in children:
            child.wait(max(deadline - time.monotonic(), 0.0))
    except subprocess.TimeoutExpired:
        print(
            f"still running {grace:.0f} s after the interrupt: killing it",
            file=sys.stderr,
            flush=True,
        )
    finally:
        for child in children:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()


@contextmanager
def whole_lock() -> Iterator[None]:
    """Keep every dvc from writing dvc.lock: other stages may be ending just now. The lock is dvc's
    own, on the repository."""
    try:
        file = (ROOT / ".dvc" / "tmp" / "lock").open()
    except FileNotFoundError:  # no dvc has ever run here
        yield
        return
    with file:
        fcntl.flock(file, fcntl.LOCK_SH)
        yield


def held(said: str) -> list[str]:
    """What to do where DVC, in these words, refuses because of its notes of who reads and writes
    which file. It forgets a holder whose pid is gone, and not one whose pid another process has by
    now, nor a file that it was killed in writing."""
    if not HELD.search(said):
        return []
    notes = ROOT / ".dvc" / "tmp" / "rwlock"
    return [f"wait for the dvc that is at work here, or, when no dvc runs, remove '{notes}'"]


def broken_locks() -> list[str]:
    """What is wrong with the locks of the data roots."""
    with whole_lock():
        return lock.broken(ROOT)
