"""The sandbox: a program has no access to anything outside, and leaves no process or file."""

import json
import os
import socket
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import psutil
import pytest

from tasks.grading.programs import sandbox
from tasks.grading.programs.command import Sandbox, python
from tasks.grading.programs.sandbox import Session, Stopped
from tasks.grading.programs.system_calls import seccomp_filter
from tests.grading.test_code import ADD, SUM, graded
from tests.patience import wait_for

pytestmark = pytest.mark.sandbox

RIGHT_ADD = "def add(a, b): return a + b"
RIGHT_SUM = "print(sum(map(int, input().split())))"
MINE = Sandbox("bubblewrap", 512, False)


def inside(program: str) -> Any:
    """Return the value of a program's function `look`, called in the sandbox."""
    with Session(MINE) as session:
        loaded = session.ask(
            {"load": program, "name": "p", "run": True, "before": "", "seconds": 5}, 15
        )
        assert loaded == {"value": None}
        reply = session.ask({"evaluate": "look()", "seconds": 5}, 15)
    return reply.get("value", reply)


def running(token: str) -> list[int]:
    """Return the processes of this machine with `token` in their command line."""
    found = psutil.process_iter(["cmdline"])
    return [one.pid for one in found if token in " ".join(one.info["cmdline"] or [])]


@pytest.mark.parametrize("ends", ["", "os._exit(0)", "os.kill(os.getpid(), 9)", "time.sleep(9)"])
def test_no_zombie_is_left(ends: str) -> None:
    """Zombies would fill the table of processes on machines without a reaper."""
    with Session(MINE) as session:
        pids = [session.popen.pid, *session.inner]
        if ends:
            request = {"execute": f"import os, time\n{ends}", "seconds": 5}
            with pytest.raises(Stopped):
                session.ask(request, 0.5)
    assert len(pids) == 2
    assert [pid for pid in pids if Path(f"/proc/{pid}").exists()] == []


def test_all_processes_end_with_the_grader() -> None:
    token = f"98765{uuid.uuid4().int % 10**12}"
    run = f"__import__('os').execv('/usr/bin/sleep', ['sleep', '{token}'])"
    code = (
        "from tasks.grading.programs.sandbox import Session\n"
        "from tasks.grading.programs.command import Sandbox\n"
        "session = Session(Sandbox('bubblewrap', 512, False))\n"
        f"session.ask({{'evaluate': {run!r}, 'seconds': 100}}, 100)\n"
    )
    grades = subprocess.Popen([sys.executable, "-c", code])
    try:
        wait_for(lambda: len(running(token)) >= 2)  # the process that grades and the program
    finally:
        grades.kill()
        grades.wait()
    wait_for(lambda: not running(token))


def test_parent_is_not_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    found = inside(
        "import os, glob\n"
        "def read(path):\n"
        "    try: return open(path, 'rb').read().decode('latin-1')\n"
        "    except OSError: return ''\n"
        "def look():\n"
        "    text = str(dict(os.environ))\n"
        "    for path in glob.glob('/proc/[0-9]*/environ') + glob.glob('/proc/[0-9]*/cmdline'):\n"
        "        text += read(path)\n"
        "    pids = [int(name) for name in os.listdir('/proc') if name.isdigit()]\n"
        f"    parent = read('/proc/{os.getpid()}/environ')\n"
        "    return [text, parent, len(pids), os.listdir('/')]\n"
    )
    text, parent, processes, root = found
    assert "hunter2" not in text + parent
    assert processes <= 3
    for path in (python(), "--ro-bind", str(Path.cwd()), str(Path.home())):
        assert path not in text
    assert not {"home", "var", "work", "sys", "run", "mnt", "srv", "opt"} & set(root)


def test_files_of_the_project_and_of_users_are_not_readable(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("hunter2")
    paths = [str(secret), sandbox.__file__, "/etc/passwd", "/etc/shadow", "/root/.bashrc"]
    paths += [f"/proc/1/root{secret}", f"/proc/self/cwd{secret}", str(Path.cwd())]
    assert inside(f"import os\ndef look(): return [*filter(os.path.exists, {paths})]") == []


def test_only_its_own_folder_is_writable() -> None:
    places = ["/x", "/usr/x", "/dev/x", "/etc/x", "/proc/sys/kernel/hostname"]
    places += [f"{Path(python()).parent}/x", "/root/x"]
    program = (
        "def look():\n"
        "    written = []\n"
        f"    for path in {places}:\n"
        "        try: open(path, 'w').write('x'); written.append(path)\n"
        "        except OSError: pass\n"
        "    open('mine', 'w').write('x')\n"
        "    return written\n"
    )
    assert inside(program) == []


def test_number_of_files_is_limited() -> None:
    """There are limits on open files and on existing files."""
    opened = "files = [open('x', 'w') for _ in range(100)]"
    assert "Too many open files" in graded(opened, SUM).answer
    made = (
        "import os, time\n"
        "for i in range(12_000): os.close(os.open(str(i), os.O_CREAT))\n"
        "time.sleep(1000)"
    )
    verdict = graded(made, SUM, seconds=20.0, total_seconds=60.0, stop_at_failure=True)
    assert verdict.outcome == "wrong"
    assert "file limit: it has made more than 10000 files" in verdict.answer


def test_network_is_not_reachable() -> None:
    program = (
        "import socket\n"
        "def attempt(address):\n"
        "    try: socket.create_connection(address, 2).close(); return 'connected'\n"
        "    except OSError as error: return type(error).__name__\n"
        "def look():\n"
        "    lines = open('/proc/net/dev').read().splitlines()[2:]\n"
        "    interfaces = [line.partition(':')[0].strip() for line in lines]\n"
        "    return [interfaces, attempt(('127.0.0.1', PORT)), attempt(('192.0.2.1', 80))]\n"
    )
    with socket.create_server(("127.0.0.1", 0)) as server:
        found = inside(program.replace("PORT", str(server.getsockname()[1])))
    assert found == [["lo"], "ConnectionRefusedError", "OSError"]


DENIED = {
    "a namespace": "syscall(272, 0x10000000)",
    "a namespace by clone": "syscall(56, 0x10000011, 0, 0, 0, 0)",
    "a mount": "syscall(165, b'none', b'/tmp', b'tmpfs', 0, 0)",
    "memory that no limit counts": "syscall(319, b'x', 0)",
    "shared memory": "syscall(29, 0, 1 << 20, 0o1600)",
    "a trace": "syscall(101, 16, os.getppid(), 0, 0)",
    "io_uring": "syscall(425, 8, 0)",
    "a socket to a virtual machine's host": "syscall(41, 40, 1, 0)",
    "a socket to the kernel": "syscall(41, 16, 3, 0)",
    "keys": "syscall(250, 0, -3, 1)",
    "x32 calls": "syscall(0x40000000 + 39)",
}  # fmt: skip


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the numbers are those of x86-64")
def test_system_calls_that_allow_an_escape_are_denied() -> None:
    program = (
        "import ctypes, os\n"
        "def syscall(*arguments):\n"
        "    libc = ctypes.CDLL(None, use_errno=True)\n"
        "    return 'allowed' if libc.syscall(*arguments) >= 0 else ctypes.get_errno()\n"
        f"def look(): return [eval(call) for call in {[*DENIED.values()]}]\n"
    )
    assert dict(zip(DENIED, inside(program), strict=True)) == dict.fromkeys(DENIED, 1)  # EPERM


def test_filter_is_written_for_two_processors() -> None:
    filters = [seccomp_filter(machine) for machine in ("x86_64", "aarch64")]
    assert all(one is not None and len(one) % 8 == 0 for one in filters)
    assert filters[0] != filters[1]
    assert seccomp_filter("riscv64") is None


def test_program_has_no_privileges() -> None:
    found = inside("def look(): return open('/proc/self/status').read()")
    status = dict(line.split(":\t") for line in found.splitlines() if ":\t" in line)
    ids = " ".join(status[name] for name in ("Uid", "Gid", "Groups"))
    assert "0" not in ids.split()
    assert (int(status["CapEff"], 16), int(status["CapPrm"], 16)) == (0, 0)
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")


def test_plain_process_has_limits_and_an_empty_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    plain: dict[str, Any] = {"sandbox": "process", "seconds": 1.0, "stop_at_failure": True}
    assert graded(RIGHT_ADD, ADD, **plain).outcome == "correct"
    assert graded(RIGHT_SUM, SUM, **plain).outcome == "correct"
    assert "memory limit" in graded("x = bytearray(10 << 30)", SUM, **plain).answer
    gold = json.dumps({"fn_name": "f", "inputs": [[]], "outputs": [True]})
    looks = "import os\ndef f(): return 'SECRET_TOKEN' not in os.environ and os.listdir() == []"
    assert graded(looks, gold, **plain).outcome == "correct"
    assert "time limit" in graded("while True: pass", SUM, **plain).answer
