"""dvc as a subprocess: queries (graph, status), and bringing one stage up to date.

One dvc process serves a whole flow run (see `flows.pipeline.launch`). Stages that run at the same
time have a dvc each. To keep these apart, dvc locks the repository while it accesses dvc.lock, but
not while a stage runs. Each dvc has its own process group, so Ctrl-C reaches only the flow,
which then stops the whole group: first with SIGINT, so that the stage saves its state and exits
while dvc waits for it; then, after GRACE_SECONDS, with SIGKILL. (SIGTERM would kill dvc and its
stage at once, before the stage could save.) If the flow itself is killed, the kernel kills dvc and
the stage, because both have requested a signal for the death of their parent."""

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
from typing import Any

from flows.pipeline import lock
from flows.pipeline.output import Output
from tasks.common.files import temporary_folder
from tasks.common.processes import ending, forks

CODE = Path(__file__).resolve().parents[2]
STAGE = "python -m tasks.code --params params.yaml --data data"
GRACE_SECONDS = 20.0
POLL_SECONDS = 0.05
LOOK_SECONDS = 1.0
NO_GIT = (
    "this is not a git repository; if that is intended, run: dvc config --local core.no_scm true"
)
HELD = re.compile("is being blocked by:|RWLock-file")
EDGE = re.compile(r'^"(?P<node>[^"]+)"(?: -> "(?P<dependent>[^"]+)")?;?$', re.MULTILINE)


def project() -> Path:
    """Return the nearest folder with a Winnow pipeline, from the current one up; else CODE."""
    with suppress(OSError, ValueError):  # the folder may be gone, or the file not text
        for folder in (Path.cwd(), *Path.cwd().parents):
            file = folder / "dvc.yaml"
            if (folder / ".dvc").is_dir() and file.is_file() and STAGE in file.read_text():
                return folder
    return CODE


ROOT = project()
NAME = re.sub(r"[/%&<>]", "-", ROOT.name) or "winnow"  # of the project on a Prefect server


class CommandError(RuntimeError):
    """Raised if a dvc command fails; dvc's own message is on the terminal."""


def require_project() -> None:
    """Raise CommandError in a folder whose params.yaml no command would read."""
    with suppress(FileNotFoundError):  # the folder is gone
        for folder in (Path.cwd(), *Path.cwd().parents):
            if folder == ROOT:
                return
            is_other = (folder / ".dvc").is_dir() or not (folder / "dvc.yaml").exists()
            is_data_root = folder.is_relative_to(ROOT) and not is_other
            if (folder / "params.yaml").is_file() and not is_data_root:
                raise CommandError(
                    f"{folder} has a params.yaml, but is no Winnow project: copy the values into a "
                    f"new one (`winnow init FOLDER`), or change to a project, such as {ROOT}"
                )


class Dvc:
    """A dvc process that runs until the end of the `with` block. Methods raise CommandError if dvc
    ends or a query fails; an exception while a method waits stops dvc's process group. With
    `is_labelled`, a stage's output is passed on line by line, prefixed with `output.label`."""

    def __init__(self, *, is_labelled: bool = False) -> None:
        requests, to_dvc = os.pipe()
        from_dvc, answers = os.pipe()
        self.output = Output(is_labelled=is_labelled)
        stdout, stderr = self.output.ends
        with ending.interrupts_blocked():
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
        self.watch: Callable[[Output], object] | None = None  # called once a second
        self.is_ended = False

    def __enter__(self) -> "Dvc":
        return self

    def __exit__(self, _: object, error: BaseException | None, trace: object) -> None:
        with self.stack:
            # after a CommandError dvc waits for a request, and exits when its pipe is closed
            interrupt = error is not None and not isinstance(error, CommandError)
            end_all([self], interrupt=interrupt)
            self.output.join()
            self.answers.close()

    def fork_stages(self) -> None:
        """Start the process from which stages are forked, if this machine allows it. It belongs to
        dvc's process group, and is stopped with the group."""
        if forks.ADDRESS in self.extra or not forks.are_possible():
            return
        folder = self.stack.enter_context(temporary_folder(None, "winnow"))
        address = str(folder / "forks")
        with ending.interrupts_blocked():
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
        """Run one dvc command line, and return its answer (see `flows.pipeline.launch`). With
        `stage`, dvc may write to the terminal, and `started` refers to that stage's command.
        `output.lines` then contains the lines that dvc wrote."""
        self.output.lines.clear()
        try:
            environ = {**environment(), **self.extra}
            request = {"arguments": arguments, "stage": stage, "environment": environ}
            self.requests.write(json.dumps(request) + "\n")
            self.requests.flush()
            answer = json.loads(self.read_line())
        except (BrokenPipeError, ValueError) as error:
            if self.is_ended:  # by another, interrupted thread
                raise KeyboardInterrupt from error
            raise CommandError(
                f"dvc ended during {' '.join(arguments)}; see its output above"
            ) from error
        except BaseException:  # an interrupt: the stage must save now, not at the end
            end_all([self], interrupt=True)
            raise
        self.output.settle()
        return answer

    def read_line(self) -> bytes:
        """Return the next line that dvc sends, or the partial line if dvc has ended.

        It polls every POLL_SECONDS, because a library's signal handler may keep an interrupt from
        ending a blocked read."""
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

    def query(self, *arguments: str) -> str:
        """Return what a read-only dvc command prints. If it fails, raise CommandError."""
        answer = self.ask(*arguments)
        if answer["code"]:
            said = " ".join(self.output.lines.tail)
            remedies = [NO_GIT] if "is not a git repository" in said else broken_locks()
            remedies = remedies or [*lock.refused(said), *lock_remedies(said)]
            remedy = "; ".join(remedies) or "see its output above"
            raise CommandError(f"dvc {' '.join(arguments)} failed; {remedy}")
        return str(answer["output"])

    def graph(self) -> dict[str, set[str]]:
        """Return the direct dependencies of each stage, with stages in the order of `dvc dag`."""
        needs: dict[str, set[str]] = {}
        for match in EDGE.finditer(self.query("dag", "--dot")):
            needs.setdefault(match["node"], set())
            if match["dependent"]:
                needs.setdefault(match["dependent"], set()).add(match["node"])
        return needs

    def status(self, *stages: str) -> dict[str, list[Any]]:
        """Return the changes per stage in dvc's words; stages that are up to date are absent."""
        return dict(json.loads(self.query("--wait-for-lock", "status", "--json", *stages)))

    def repro(self, stage: str, force: bool = False) -> tuple[int, bool]:
        """Bring one stage up to date, ignoring upstream stages. Return (exit status, whether its
        command was started). `output` then contains the written lines."""
        options = ["--single-item", *(["--force"] if force else [])]
        # another dvc may have the lock when the stage ends: waiting saves the stage's work
        answer = self.ask("--wait-for-lock", "repro", *options, stage, stage=stage)
        return int(answer["code"]), bool(answer["started"])


def environment() -> dict[str, str]:
    """Return this environment with a PATH on which `python` is the flow's interpreter."""
    folder = os.path.dirname(sys.executable)
    return {**os.environ, "PATH": os.pathsep.join([folder, os.environ.get("PATH", os.defpath)])}


def launcher(*arguments: str) -> list[str]:
    """Return the command of a child that runs a module and dies with this process (`launch.py`)."""
    return [sys.executable, "-m", "flows.pipeline.launch", str(os.getpid()), *arguments]


def end_all(dvcs: Sequence[Dvc], interrupt: bool) -> None:
    """Stop all dvc processes at once, so that their stages save in parallel. An idle dvc exits when
    its request pipe is closed; with `interrupt`, also send SIGINT (see `end_groups`)."""
    for dvc in dvcs:
        dvc.is_ended = True
        with suppress(BrokenPipeError):
            dvc.requests.close()
    end_groups([dvc.child for dvc in dvcs], interrupt=interrupt)


def end_groups(children: Sequence["subprocess.Popen[Any]"], interrupt: bool = True) -> None:
    """Send SIGINT to the process groups of `children` if `interrupt`. Kill the groups only when all
    `children` have ended, or after GRACE_SECONDS, because one group may depend on another."""
    deadline = time.monotonic() + GRACE_SECONDS
    try:
        for child in children if interrupt else ():
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGINT)
        for child in children:
            child.wait(max(deadline - time.monotonic(), 0.0))
    except subprocess.TimeoutExpired:
        message = f"still running {GRACE_SECONDS:.0f} s after the interrupt: killing it"
        print(message, file=sys.stderr, flush=True)
    finally:
        for child in children:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            child.wait()


@contextmanager
def whole_lock() -> Iterator[None]:
    """Prevent every dvc from writing dvc.lock during the block, since other stages may be
    finishing. The lock is dvc's own lock on the repository."""
    try:
        file = (ROOT / ".dvc" / "tmp" / "lock").open()
    except FileNotFoundError:  # no dvc has ever run here
        yield
        return
    with file:
        fcntl.flock(file, fcntl.LOCK_SH)
        yield


def lock_remedies(said: str) -> list[str]:
    """Return the remedies if DVC's message `said` is about its file locks (.dvc/tmp/rwlock), else
    none. DVC drops an entry whose process is gone, but not if another process now has that pid, and
    it cannot read a lock file that a kill left incomplete."""
    if not HELD.search(said):
        return []
    notes = ROOT / ".dvc" / "tmp" / "rwlock"
    return [f"wait for the running dvc; if no dvc runs here, remove '{notes}'"]


def broken_locks() -> list[str]:
    """Return a message for each of the data roots' dvc.lock files that cannot be read."""
    with whole_lock():
        return lock.broken(ROOT)
