"""The command that starts an interpreter in the sandbox, with or without bubblewrap."""

import contextlib
import itertools
import os
import platform
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal

from tasks.grading.programs.system_calls import seccomp_filter

Kind = Literal["bubblewrap", "process"]

FOLDER = "/tmp"  # nosec B108  # inside
FOLDER_BYTES = 64 << 20  # of all files inside
PYTHON = "/python"  # a link to the interpreter, inside
# user ids for programs started by root: within the range of containers, outside the range that
# systems assign. Each start uses the next id: dying processes of the previous one do not count.
FIRST_USER, NUM_USERS = 61_184, 4_000

starts = itertools.count(os.getpid() * 97)


class SandboxError(Exception):
    """Raised if the sandbox itself fails, before the program is loaded."""


@dataclass(frozen=True)
class Sandbox:
    """A kind of sandbox, and a program's resources: `memory_mb` (MiB of address space per process;
    all together may use twice that in resident memory), and access to installed `packages`."""

    kind: Kind
    memory_mb: int
    packages: bool


@cache
def python() -> str:
    """Return the path of the interpreter, with links of a virtual environment resolved."""
    return os.path.realpath(getattr(sys, "_base_executable", sys.executable))


def interpreter(path: str) -> list[str]:
    """Return the command for Python in isolated mode, without site-packages or bytecode files."""
    return [path, "-I", "-S", "-B", "-X", "utf8"]


@cache
def packages() -> str:
    """Return the folder of the environment's packages."""
    return sysconfig.get_path("purelib")


@contextlib.contextmanager
def bubblewrap(sandbox: Sandbox) -> Iterator[tuple[list[str], list[int]]]:
    """Yield the command, up to the interpreter's arguments, and the descriptors that it reads.

    The options name folders of this machine. They are passed in a file, because the program can
    read the first process's command line. Raise SandboxError for an unsupported processor."""
    calls = seccomp_filter()
    if calls is None:
        raise SandboxError(f"there is no filter of system calls for {platform.machine()}")
    with in_memory("filter", calls) as filter_file:
        options = "".join(f"{word}\0" for word in options_of(sandbox, filter_file))
        with in_memory("options", options.encode()) as options_file:
            bwrap = [shutil.which("bwrap") or "bwrap", "--args", str(options_file), "--"]
            yield [*bwrap, *as_nobody(), *interpreter(PYTHON)], [filter_file, options_file]


def options_of(sandbox: Sandbox, filter_file: int) -> list[str]:
    """Return bubblewrap's options for this sandbox."""
    options = [
        *("--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts"),
        *("--unshare-cgroup-try", "--die-with-parent", "--new-session", "--clearenv"),
        *("--cap-drop", "ALL", "--seccomp", str(filter_file)),
        *(word for name in ("LANG", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")
          for word in ("--setenv", name, "C.UTF-8" if name == "LANG" else "1")),
        *("--perms", "1777", "--size", str(FOLDER_BYTES), "--tmpfs", FOLDER, "--proc", "/proc"),
        *(*files(sandbox.packages), "--remount-ro", "/", "--chdir", FOLDER),
    ]  # fmt: skip
    if os.geteuid() != 0:
        return [*options, "--unshare-user", "--uid", "65534", "--gid", "65534"]
    return [*options, "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]


def as_nobody() -> list[str]:
    """Return the command prefix that drops root's user id; empty for other users."""
    if os.geteuid() != 0:
        return []
    user = str(FIRST_USER + next(starts) % NUM_USERS)
    command = ["/usr/bin/setpriv", "--reuid", user, "--regid", user]
    return [*command, "--clear-groups", "--inh-caps=-all", "--"]


@cache
def files(with_packages: bool) -> list[str]:
    """Return bubblewrap's options for the files inside: system, Python, packages and devices."""
    prefix = Path(python()).parent.parent
    mounted = [Path("/usr/bin"), prefix / "bin"]
    mounted += [root / name for root in (Path("/usr"), prefix) for name in ("lib", "lib64")]
    mounted += [Path("/etc/ld.so.cache"), *([Path(packages())] if with_packages else [])]
    links = [Path("/bin"), Path("/lib"), Path("/lib64")]
    mounted += [path for path in links if not path.is_symlink()]
    options: list[str] = []
    made: set[Path] = set()
    for path in dict.fromkeys(path for path in mounted if path.exists()):
        if any(parent in made for parent in path.parents):
            continue  # already mounted
        options += list(parents(path, made))
        options += ["--ro-bind", str(path), str(path)]
        made.add(path)
    for link in links:
        if link.is_symlink():
            options += ["--symlink", os.readlink(link), str(link)]
    options += ["--perms", "0755", "--dir", "/dev", "--symlink", FOLDER, "/dev/shm"]
    options += ["--symlink", python(), PYTHON]
    for name in ("null", "zero", "full", "random", "urandom"):
        options += ["--dev-bind", f"/dev/{name}", f"/dev/{name}"]
    for name, number in (("stdin", "0"), ("stdout", "1"), ("stderr", "2"), ("fd", "")):
        options += ["--symlink", f"/proc/self/fd/{number}".rstrip("/"), f"/dev/{name}"]
    return options


def parents(path: Path, made: set[Path]) -> Iterator[str]:
    """Yield the options that create the parent folders of `path`. Bubblewrap itself would make them
    unreadable for other users."""
    for folder in [*path.parents][-2::-1]:
        if folder not in made:
            yield from ("--perms", "0755", "--dir", str(folder))


@contextlib.contextmanager
def in_memory(name: str, content: bytes) -> Iterator[int]:
    """Yield a descriptor from which `content` can be read."""
    descriptor = os.memfd_create(name)
    try:
        os.write(descriptor, content)
        os.lseek(descriptor, 0, os.SEEK_SET)
        yield descriptor
    finally:
        os.close(descriptor)
