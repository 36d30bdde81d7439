"""Hostile programs: each is graded as wrong, reaches nothing outside, and leaves nothing behind."""

import json
import os
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tasks.grading import sandbox
from tasks.grading.grader import Answer, Grader
from tasks.grading.sandbox import Session, Stopped
from tasks.grading.sandbox_command import Sandbox, python
from tasks.grading.sandbox_filter import seccomp_filter
from tasks.grading.settings import Verify
from tests.grading.test_code import ADD, SETTINGS, SUM, graded
from tests.patience import PATIENCE

pytestmark = pytest.mark.sandbox

RIGHT_ADD = "def add(a, b): return a + b"
RIGHT_SUM = "print(sum(map(int, input().split())))"
MINE = Sandbox("bubblewrap", 512, False)


@pytest.fixture(autouse=True)
def _the_next_program_is_graded_as_ever() -> Iterator[None]:
    yield
    assert graded(RIGHT_ADD, ADD).outcome == "correct"
    assert graded(RIGHT_SUM, SUM).outcome == "correct"


def told(program: str) -> Any:
    """What a program inside finds out: the value of its function `look`."""
    with Session(MINE) as session:
        loaded = session.ask(
            {"load": program, "name": "p", "run": True, "before": "", "seconds": 5}, 15
        )
        assert loaded == {"value": None}
        reply = session.ask({"evaluate": "look()", "seconds": 5}, 15)
    return reply.get("value", reply)


def running(token: str) -> list[str]:
    """The processes of this machine that have `token` in their command line."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if token.encode() in path.read_bytes():
                found.append(path.parent.name)
        except OSError:
            continue
    return found


FORGERIES = {
    "the end before the tests": "import os\nos._exit(0)",
    "a kill in a test": "import os\ndef add(a, b): os.kill(os.getpid(), 9)",
    "the end in a test": "import os\ndef add(a, b): os._exit(0)",
    "a result that equals all": (
        "class All:\n    def __eq__(self, other): return True\n    def __hash__(self): return 1\n"
        "def add(a, b): return All()"
    ),
    "a number that equals all": (
        "class All(int):\n    def __eq__(self, other): return True\n"
        "    def __ne__(self, other): return False\n"
        "def add(a, b): return All(7)"
    ),
    "replies in advance": (
        "import os\n"
        "for fd in range(3, 64):\n"
        "    try: os.write(fd, b'{\"value\": 3}\\n' * 3)\n"
        "    except OSError: pass\n"
        "def add(a, b): return 7"
    ),
    "replies of another form": (
        "import os\n"
        "def add(a, b):\n"
        "    for fd in range(3, 64):\n"
        "        try: os.write(fd, b'{\"passed\": true, \"value\": {\"correct\": 1}}\\n')\n"
        "        except OSError: pass\n"
        "    os._exit(0)"
    ),
    "closed pipes": (
        "import os\n"
        "def add(a, b):\n"
        "    os.closerange(0, 100)\n"
        "    return a + b"
    ),
    "stack frames": (
        "import sys, gc\n"
        "def add(a, b):\n"
        "    frame = sys._getframe()\n"
        "    while frame:\n"
        "        for value in [*frame.f_locals.values(), *frame.f_globals.values()]:\n"
        "            if isinstance(value, dict) and 'outputs' in value:\n"
        "                return value['outputs'][0]\n"
        "        frame = frame.f_back\n"
        "    for thing in gc.get_objects():\n"
        "        if isinstance(thing, dict) and ('outputs' in thing or 'expected' in thing):\n"
        "            return thing.get('outputs', thing.get('expected'))\n"
        "    return 'found nothing'"
    ),
    "patched json": (
        "import json\n"
        "json.dumps = lambda *a, **k: '{\"value\": true}'\n"
        "def add(a, b): return 7"
    ),
    "patched builtins": (
        "import builtins, sys\n"
        "sys.modules['__main__'].__dict__['exec'] = None\n"
        "builtins.isinstance = lambda *a: True\n"
        "def add(a, b): return 7"
    ),
    "a deep result": (
        "def add(a, b):\n"
        "    import os\n"
        "    for fd in range(3, 64):\n"
        "        try: os.write(fd, b'{\"value\": ' + b'[' * 100000 + b']' * 100000 + b'}\\n')\n"
        "        except OSError: pass\n"
        "    os._exit(0)"
    ),
    "a result without end": (
        "def add(a, b):\n"
        "    import os\n"
        "    while True:\n"
        "        for fd in range(3, 64):\n"
        "            try: os.write(fd, b'x' * 65536)\n"
        "            except OSError: pass\n"
    ),
    "a huge integer": "def add(a, b): return 10 ** 100000",
}  # fmt: skip


@pytest.mark.parametrize("name", FORGERIES)
def test_a_result_cannot_be_forged(name: str) -> None:
    verdict = graded(FORGERIES[name], ADD)
    assert (verdict.outcome, verdict.partial) == ("wrong", 0.0), verdict.answer


REPLIES = {
    "no object": "[1]",
    "a number": "7",
    "nothing": "null",
    "no JSON": "{",
    "no text": "\xff\xfe\x00",
    "no value": "{}",
    "another word": '{"ready": true}',
    "an exception of no text": '{"exception": null}',
    "a deep exception": '{"exception": ' + "[" * 900 + "]" * 900 + "}",
    "a deep value": '{"value": ' + "[" * 900 + "]" * 900 + "}",
    "a deeper value": '{"value": ' + '{"tuple": [' * 900 + "]}" * 900 + "}",
    "an unknown kind": '{"value": {"list": [1]}}',
    "two kinds": '{"value": {"set": [1], "tuple": [1]}}',
    "a set of lists": '{"value": {"set": [[1]]}}',
    "a set of nothing": '{"value": {"set": null}}',
    "a mapping of numbers": '{"value": {"dict": [1]}}',
    "a mapping of lists": '{"value": {"dict": [[[1], 2]]}}',
    "bytes of a number": '{"value": {"bytes": 7}}',
    "a complex of text": '{"value": {"complex": ["a", 1]}}',
    "a huge complex": '{"value": {"complex": [1' + "0" * 400 + ", 0]}}",
    "a type of lists": '{"value": {"other": [[1]]}}',
    "infinity": '{"value": Infinity}',
    "a status of text": '{"status": "0", "stdout": "Mwo=", "stderr": ""}',
    "a status below": '{"status": -7, "stdout": "Mwo=", "stderr": ""}',
    "a huge status": '{"status": 1' + "0" * 4000 + ', "stdout": "Mwo=", "stderr": ""}',
    "no base64": '{"status": 0, "stdout": "%%%", "stderr": ""}',
    "a number as output": '{"status": 0, "stdout": 3, "stderr": null}',
}  # fmt: skip


@pytest.mark.parametrize("name", REPLIES)
def test_whatever_is_replied_is_wrong_and_never_an_error(name: str) -> None:
    """A verifier that raises makes an `error`, which costs a program nothing."""
    reply = (REPLIES[name] + "\n").encode("latin-1")
    write = (
        "import os\n"
        "def write(pid):\n"
        "    for fd in range(3, 16):\n"
        f"        try: os.write(os.open(f'/proc/{{pid}}/fd/{{fd}}', os.O_WRONLY), {reply!r})\n"
        "        except OSError: pass\n"
    )
    ends = "        os._exit(0)"
    call = f"{write}def add(a, b):\n    try: write('self')\n    finally:\n{ends}"
    direct = call.replace("os.write(os.open(f'/proc/{pid}/fd/{fd}', os.O_WRONLY)", "os.write(fd")
    asserts = json.dumps({"asserts": ["assert add(1, 2) == 3", "assert add(1, 2) + 1 == 4"]})
    for program, gold in ((call, ADD), (direct, ADD), (direct, asserts)):
        for tolerance in (None, 1e-6):
            verdict = graded(program, gold, float_tolerance=tolerance)
            assert (verdict.outcome, verdict.partial) == ("wrong", 0.0), verdict.answer
    verdict = graded(f"{write}write(os.getppid())\nwhile True: pass", SUM, seconds=0.3)
    assert (verdict.outcome, verdict.partial) == ("wrong", 0.0), verdict.answer


FORGED_OUTPUTS = {
    "all tests passed": "print('all tests passed')",
    "the end": "import os\nos._exit(0)",
    "a report on every pipe": (
        "import os\n"
        "report = b'{\"status\": 0, \"stdout\": \"OQo=\", \"stderr\": \"\"}\\n'\n"
        "for process in ('self', os.getppid()):\n"
        "    for fd in range(0, 64):\n"
        "        try: open(f'/proc/{process}/fd/{fd}', 'wb').write(report)\n"
        "        except OSError: pass\n"
    ),
    "itself stopped": "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)",
    "its parent stopped": "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)",
    "everybody stopped": "import os, signal\nos.kill(-1, signal.SIGKILL)",
    "output after the end": (
        "import os, time\n"
        "if os.fork() == 0:\n"
        "    time.sleep(0.5)\n"
        "    print(3)\n"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FORGED_OUTPUTS)
def test_an_output_cannot_be_forged(name: str) -> None:
    verdict = graded(FORGED_OUTPUTS[name], SUM)
    assert (verdict.outcome, verdict.partial) == ("wrong", 0.0), verdict.answer


LIMITS = {
    "a loop": ("def add(a, b):\n    while True: pass", ADD, "time limit"),
    "a loop in the program": ("while True: pass", ADD, "time limit"),
    "a loop for standard input": ("while True: pass", SUM, "time limit"),
    "a loop that ignores signals": (
        "import signal\n"
        "for number in range(1, 65):\n"
        "    try: signal.signal(number, signal.SIG_IGN)\n"
        "    except (OSError, ValueError): pass\n"
        "while True: pass",
        SUM,
        "time limit",
    ),
    "sleep": ("import time\ndef add(a, b): time.sleep(1000)", ADD, "time limit"),
    "limits raised": (
        "import resource\n"
        "for kind in (resource.RLIMIT_CPU, resource.RLIMIT_AS, resource.RLIMIT_NPROC):\n"
        "    try: resource.setrlimit(kind, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))\n"
        "    except (OSError, ValueError): pass\n"
        "x = bytearray(10 << 30)",
        SUM,
        "memory limit",
    ),
    "ten gigabytes": ("x = bytearray(10 << 30)", SUM, "memory limit"),
    "ten gigabytes in a call": ("def add(a, b): return bytearray(10 << 30)", ADD, "memory limit"),
    "ten gigabytes in processes": (
        "import os, time\n"
        "for _ in range(20):\n"
        "    if os.fork() == 0:\n"
        "        x = bytearray(400 << 20)\n"
        "        time.sleep(100)\n"
        "time.sleep(100)",
        SUM,
        "memory limit",
    ),
    "ten gigabytes in processes of a thread": (
        "import os, threading, time\n"
        "def work():\n"
        "    for _ in range(12):\n"
        "        if os.fork() == 0:\n"
        "            x = bytearray(400 << 20)\n"
        "            time.sleep(100)\n"
        "    time.sleep(100)\n"
        "threading.Thread(target=work).start()\n"
        "time.sleep(100)",
        SUM,
        "memory limit",
    ),
    "output without end": ("while True: print('x' * 10000)", SUM, "output limit"),
    "a large file": (
        "with open('x', 'wb') as file:\n    while True: file.write(b'x' * (1 << 20))",
        SUM,
        "output limit",
    ),
    "many files": (
        "for i in range(10000):\n    open(f'{i}', 'wb').write(b'x' * (1 << 20))",
        SUM,
        "",
    ),
    "recursion": (
        "import sys\nsys.setrecursionlimit(10 ** 9)\ndef f(): f()\nf()",
        SUM,
        "",
    ),
    "a source that breaks the parser": ("(" * 5000 + ")" * 5000, SUM, ""),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LIMITS)
def test_limits_stop_a_program(name: str) -> None:
    program, gold, said = LIMITS[name]
    started = time.monotonic()
    # on a busy machine it takes a while until processes hold much
    seconds = 5.0 if "processes" in name else 1.0
    verdict = graded(program, gold, seconds=seconds, memory_mb=512)
    assert (verdict.outcome, verdict.partial) == ("wrong", 0.0)
    assert said in verdict.answer
    assert time.monotonic() - started < PATIENCE


@pytest.mark.slow
@pytest.mark.parametrize("ends", [True, False])
def test_a_fork_bomb_is_limited_and_dies(ends: bool) -> None:
    """Its processes are counted from outside while it runs, and are gone soon after."""
    token = f"98765{uuid.uuid4().int % 10**12}"
    bomb = (
        "import os\n"
        "while True:\n"
        "    try:\n"
        "        if os.fork() == 0:\n"
        "            os.setsid()\n"
        f"            os.execv('/usr/bin/sleep', ['sleep', '{token}'])\n"
        f"    except OSError:\n        {'break' if ends else 'pass'}\n"
        "import time; time.sleep(2.0)\n"  # so that they are seen, however busy the machine is
    )
    most = 0
    done = threading.Event()

    def count() -> None:
        nonlocal most
        while not done.wait(0.1):
            most = max(most, len(running(token)))

    counter = threading.Thread(target=count)
    counter.start()
    try:
        verdict = graded(bomb, SUM, seconds=5.0)
    finally:
        done.set()
        counter.join()
    assert verdict.outcome == "wrong"
    assert 2 < most <= sandbox.MAX_PROCESSES
    assert gone(token)


def gone(token: str, seconds: float = 30.0) -> bool:
    """Whether all processes with that token end within some seconds."""
    deadline = time.monotonic() + seconds
    while running(token):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def test_a_daemon_dies_with_its_program() -> None:
    token = f"98765{uuid.uuid4().int % 10**12}"
    program = (
        "import os\n"
        "if os.fork() == 0:\n"
        "    os.setsid()\n"
        "    if os.fork() == 0:\n"
        f"        os.execv('/usr/bin/sleep', ['sleep', '{token}'])\n"
        "    os._exit(0)\n"
        "import time\n"
        "time.sleep(0.3)\n"
        f"{RIGHT_SUM}\n"
    )
    assert graded(program, SUM).outcome == "correct"
    assert gone(token)


@pytest.mark.parametrize("ends", ["", "os._exit(0)", "os.kill(os.getpid(), 9)", "time.sleep(9)"])
def test_no_process_is_left_to_wait_for(ends: str) -> None:
    """Zombies would fill the table of processes where nobody waits for orphans."""
    with Session(MINE) as session:
        pids = [session.popen.pid, *session.inner]
        if ends:
            request = {"execute": f"import os, time\n{ends}", "seconds": 5}
            with pytest.raises(Stopped):
                session.ask(request, 0.5)
    assert len(pids) == 2
    assert [pid for pid in pids if Path(f"/proc/{pid}").exists()] == []


def test_everything_dies_with_the_process_that_grades() -> None:
    token = f"98765{uuid.uuid4().int % 10**12}"
    run = f"__import__('os').execv('/usr/bin/sleep', ['sleep', '{token}'])"
    code = (
        "from tasks.grading.sandbox import Session\n"
        "from tasks.grading.sandbox_command import Sandbox\n"
        "session = Session(Sandbox('bubblewrap', 512, False))\n"
        f"session.ask({{'evaluate': {run!r}, 'seconds': 100}}, 100)\n"
    )
    grades = subprocess.Popen([sys.executable, "-c", code])
    try:
        deadline = time.monotonic() + PATIENCE
        while len(running(token)) < 2:  # the process that grades and the program
            assert time.monotonic() < deadline
            time.sleep(0.05)
    finally:
        grades.kill()
        grades.wait()
    assert gone(token)


def test_nothing_of_the_parent_can_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    found = told(
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
        "    return [text, parent, len(pids), os.path.exists('/home'), sorted(os.listdir('/'))]\n"
    )
    text, parent, processes, home, root = found
    assert "hunter2" not in text + parent
    assert (processes <= 3, home) == (True, False)
    assert {"tmp", "dev", "proc", "usr"} <= set(root)
    for path in (python(), "--ro-bind", str(Path.cwd()), str(Path.home())):
        assert path not in text
    assert not {"home", "var", "work", "sys", "run", "mnt", "srv", "opt"} & set(root)


def test_no_file_of_the_project_or_of_a_user_can_be_read(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("hunter2")
    paths = [
        str(secret),
        str(Path(sandbox.__file__)),
        "/etc/passwd",
        "/etc/shadow",
        "/root/.bashrc",
    ]
    paths += [f"/proc/1/root{secret}", f"/proc/self/cwd{secret}", str(Path.cwd())]
    assert told(f"import os\ndef look(): return [os.path.exists(p) for p in {paths}]") == [
        False
    ] * len(paths)


def test_nothing_can_be_written_outside_its_folder() -> None:
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
    assert told(program) == []


def test_files_are_limited_in_number() -> None:
    """Those that are open, and those that are there."""
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


def test_the_network_is_out_of_reach() -> None:
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
    import socket

    with socket.create_server(("127.0.0.1", 0)) as server:
        found = told(program.replace("PORT", str(server.getsockname()[1])))
    assert found == [["lo"], "ConnectionRefusedError", "OSError"]


def test_processes_outside_can_be_neither_seen_nor_killed() -> None:
    program = (
        "import os, signal\n"
        "def look():\n"
        "    killed = []\n"
        f"    for pid in [{os.getpid()}, {os.getppid()}, 1]:\n"
        "        try: os.kill(pid, signal.SIGKILL); killed.append(pid)\n"
        "        except OSError: pass\n"
        "    return [killed, os.path.exists('/proc/1')]\n"
    )
    killed, first = told(program)
    assert first is True
    assert set(killed) <= {1}  # its own first process, which ignores the signal


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
@pytest.mark.parametrize("name", DENIED)
def test_system_calls_that_open_ways_out_are_denied(name: str) -> None:
    program = (
        "import os\n"
        "def syscall(*arguments):\n"
        "    import ctypes\n"
        "    libc = ctypes.CDLL(None, use_errno=True)\n"
        "    if libc.syscall(*arguments) < 0:\n"
        "        raise OSError(ctypes.get_errno(), 'denied')\n"
        "def look():\n"
        f"    try: {DENIED[name]}\n"
        "    except OSError as error: return error.errno\n"
        "    return 'allowed'\n"
    )
    assert told(program) == 1  # EPERM


def test_the_filter_is_written_for_two_processors() -> None:
    filters = [seccomp_filter(machine) for machine in ("x86_64", "aarch64")]
    assert all(one is not None and len(one) % 8 == 0 for one in filters)
    assert filters[0] != filters[1]
    assert seccomp_filter("riscv64") is None


def test_the_program_is_nobody() -> None:
    uids = told("import os\ndef look(): return [*os.getresuid(), *os.getresgid(), *os.getgroups()]")
    assert 0 not in uids
    found = told("def look(): return open('/proc/self/status').read()")
    status = dict(line.split(":\t") for line in found.splitlines() if ":\t" in line)
    assert (int(status["CapEff"], 16), int(status["CapPrm"], 16)) == (0, 0)
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")


def test_a_session_that_was_stopped_says_why() -> None:
    with Session(MINE) as session, pytest.raises(Stopped, match="no result in 0.3 s on the clock"):
        session.ask({"evaluate": "__import__('time').sleep(9)", "seconds": 5}, 0.3)
    with Session(MINE) as session, pytest.raises(Stopped, match="SIGSEGV"):
        session.ask({"evaluate": "__import__('os').kill(2, 11)", "seconds": 5}, 5)


def test_a_plain_process_has_limits_and_an_empty_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("SECRET_TOKEN", "hunter2")
    plain: dict[str, Any] = {"sandbox": "process", "seconds": 1.0}
    assert graded(RIGHT_ADD, ADD, **plain).outcome == "correct"
    assert graded(RIGHT_SUM, SUM, **plain).outcome == "correct"
    assert "memory limit" in graded("x = bytearray(10 << 30)", SUM, **plain).answer
    gold = json.dumps({"fn_name": "f", "inputs": [[]], "outputs": [True]})
    looks = "import os\ndef f(): return 'SECRET_TOKEN' not in os.environ and os.listdir() == []"
    assert graded(looks, gold, **plain).outcome == "correct"
    assert "time limit" in graded("while True: pass", SUM, **plain).answer


@pytest.mark.slow
def test_hostile_programs_in_the_pool_are_wrong_and_never_errors() -> None:
    hostile = ["import os\nos._exit(0)", "while True: pass", "x = bytearray(10 << 30)"]
    programs = [program for bad in hostile for program in (bad, RIGHT_SUM)]
    answers = [Answer("x", f"```python\n{one}\n```", SUM, False) for one in programs]
    settings = {**SETTINGS, "seconds": 1.0}
    with Grader(Verify(2, 20.0, 4.0, 0.0, {"x": settings})) as grader:
        verdicts = grader.grade(answers)
    assert [verdict.outcome for verdict in verdicts] == ["wrong", "correct"] * 3
